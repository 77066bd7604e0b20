"""The statistics that a build's recipe asks for: read from a file, or gathered over a text and kept in one."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import llmbuild
from llmbuild.builder.calibrate import calibrate
from llmbuild.builder.ir import Program
from llmbuild.builder.passes.linear_inputs import LinearInput
from llmbuild.errors import ConfigError
from llmbuild.quantization.calibration.file import (
    Description,
    InputLayout,
    StatisticsFile,
    StatisticsWriter,
    TextUse,
)

if TYPE_CHECKING:
    from llmbuild.builder.options import BuildConfig

DEFAULT_TOKENS = 32_768
WINDOW = 512
CHARACTERS_A_TOKEN = 8  # more than tokenizers reach on documentation
NAME = "calibration.safetensors"

Progress = Callable[[int, int, str], None]


class Calibration:
    """Gives `choose_formats` its statistics.

    Args:
        config: calibration: a file that is read, or written where there is none. calibration_text, calibration_tokens.
        progress: Told while a text is run.

    Attributes:
        file: The statistics that were used, once there are any.
    """

    def __init__(self, config: BuildConfig, progress: Progress | None = None) -> None:
        self.config, self.progress = config, progress
        self.file: StatisticsFile | None = None

    def __call__(self, program: Program, inputs: Sequence[LinearInput], needed: frozenset[str]) -> StatisticsFile:
        """Return statistics of all inputs, with Gram matrices of those needed. Asked again, it returns them again.

        Raises:
            ConfigError: The file is of another model or lacks an input; or the text cannot be used.
            ModelError: An input of a linear is not finite.
        """
        if self.file is not None:
            return self.file
        path = self.config.calibration
        if path is not None and path.exists():
            file = StatisticsFile(path)
            check_covers(file, program, inputs, needed)
            self.file = file
        elif path is not None:
            self.file = self._gather(program, inputs, needed, path)
        else:
            parent = self.config.output.absolute().parent
            parent.mkdir(parents=True, exist_ok=True)
            # Beside the engine: the Gram matrices of an 8B model take 33 GB, which /tmp may not have.
            with tempfile.TemporaryDirectory(dir=parent, prefix=".calibration-") as folder:
                self.file = self._gather(program, inputs, needed, Path(folder) / NAME)
                _ = self.file.sha256  # read while it has a name; its pages stay mapped after that
        return self.file

    def gather(self, program: Program, inputs: Sequence[LinearInput], needed: frozenset[str]) -> StatisticsFile:
        """As a call, but the file is written anew where there is one."""
        assert self.config.calibration is not None
        self.file = self._gather(program, inputs, needed, self.config.calibration)
        return self.file

    def section(self) -> dict[str, Any] | None:
        """Return what the engine says of its calibration; None if there was none."""
        if self.file is None:
            return None
        texts = self.file.description.texts
        return {
            "sha256": self.file.sha256,
            "texts": [{"source": text.name, "sha256": text.sha256, "tokens": text.tokens} for text in texts],
        }

    def _gather(
        self, program: Program, inputs: Sequence[LinearInput], needed: frozenset[str], path: Path
    ) -> StatisticsFile:
        text, windows = self._windows(program)
        dtype = str(inputs[0].x.meta["val"].dtype).removeprefix("torch.")
        layouts = {each.key: InputLayout(each.columns, each.weights(program), each.key in needed) for each in inputs}
        description = describe(program, dtype, text, window_length(program), layouts)
        with StatisticsWriter(path, description) as writer:
            calibrate(program, windows, inputs, grams=needed, write=writer.write, progress=self.progress)
        return StatisticsFile(path)

    def _windows(self, program: Program) -> tuple[TextUse, Sequence[Sequence[int]]]:
        from llmbuild.builder.accuracy.texts import load_text
        from llmbuild.builder.accuracy.windows import cut, encode

        tokens = self.config.calibration_tokens or DEFAULT_TOKENS
        path, option = self.config.calibration_text, "--calibration-text"
        text = load_text(path, "calibration", characters=CHARACTERS_A_TOKEN * tokens, option=option)
        info = program.info
        encoded = encode(program.tokenizer_files.get("tokenizer.json"), text.content, info.bos_token_id)
        length = window_length(program)
        windows = cut(encoded, tokens=tokens, length=length, vocab_size=info.vocab_size, source=text.source)
        return TextUse(text.source, text.sha256, sum(map(len, windows))), windows


def window_length(program: Program) -> int:
    """Return the most tokens of a window; a short text makes shorter ones, and its statistics merge all the same."""
    return min(WINDOW, program.info.max_position_embeddings)


def describe(
    program: Program, dtype: str, text: TextUse, window: int, inputs: Mapping[str, InputLayout]
) -> Description:
    return Description(
        model=program.info.name,
        model_sha256=model_sha256(program),
        dtype=dtype,
        window=window,
        texts=(text,),
        versions={"llmbuild": llmbuild.__version__, "torch": torch.__version__},
        inputs=inputs,
    )


def model_sha256(program: Program) -> str:
    """Return one hash of all files that the model was read from."""
    return hashlib.sha256(json.dumps(sorted(program.info.source_files)).encode()).hexdigest()


def check_covers(file: StatisticsFile, program: Program, inputs: Sequence[LinearInput], needed: frozenset[str]) -> None:
    """Raise ConfigError unless the statistics are of this very model and graph and have the Gram matrices needed."""
    known = file.description
    if known.model_sha256 != model_sha256(program):
        raise ConfigError(
            f"the statistics are of another model, {known.model}, or of other files of it",
            where=f"--calibration {file.path}",
            hint="give a path that does not exist yet to have this model calibrated",
        )
    columns = {key: layout.columns for key, layout in known.inputs.items()}
    unknown = sorted(each.key for each in inputs if columns.get(each.key) != each.columns)
    if unknown:
        raise ConfigError(
            f"the statistics are of another graph of {known.model}: they lack the input of {unknown[0]} and of "
            f"{len(unknown) - 1} more",
            where=f"--calibration {file.path}",
            hint="another version of llmbuild or of transformers made them: give a path that does not exist yet",
        )
    missing = sorted(key for key in needed if not known.inputs[key].gram)
    if missing:
        raise ConfigError(
            f"the statistics have no Gram matrix of the input of {missing[0]}, and of {len(missing) - 1} more",
            where=f"--calibration {file.path}",
            hint="they were made for another recipe or fewer layers: give a path that does not exist yet to calibrate "
            "again",
        )


@dataclass(frozen=True)
class NothingKnown:
    """Stands for statistics where formats are wanted and no weight is read: in a dry run."""

    def gram(self, key: str) -> Any:
        raise AssertionError(f"a dry run has no statistics of {key}")

    mean = absmax = sample = gram
