"""The statistics file: safetensors, written input by input, so that no two Gram matrices are in memory at once.

For an input `KEY` (the checkpoint name of the first weight that reads it) of K channels it holds

    KEY.total  F64 [K]    KEY.counts I64 [BINS]    KEY.rows I64 [4]: rows, whether there is an exponent, exponent,
    KEY.absmax F32 [K]    KEY.gram   F32 [K, K], where it was asked for              and how many rows of the sample
    KEY.sample F32 [ROWS, K]         KEY.priorities I64 [ROWS]: of its rows          there are; zeros follow them

and in its metadata, as JSON under "llmbuild", what `Description` says. The same statistics give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from llmbuild.engine.hashing import sha256_file
from llmbuild.errors import ConfigError
from llmbuild.quantization.calibration.histogram import BINS, Histogram
from llmbuild.quantization.calibration.sample import ROWS, Sample
from llmbuild.quantization.calibration.statistics import InputStatistics

FORMAT_VERSION = 2
METADATA = "llmbuild"
TYPES = {torch.float64: "F64", torch.int64: "I64", torch.float32: "F32"}


@dataclass(frozen=True)
class TextUse:
    """A text that was run: its name, the SHA-256 of its UTF-8 bytes, and how many tokens of it were used."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class InputLayout:
    """One input: its channels, the checkpoint names of the weights that read it, whether its Gram matrix is kept."""

    columns: int
    weights: tuple[str, ...]
    gram: bool


@dataclass(frozen=True)
class Description:
    """What the statistics are of.

    model, model_sha256: name, and the hash of its files' hashes. dtype: computation dtype. window: tokens of a window.
    versions: package -> version. inputs: by key.
    """

    model: str
    model_sha256: str
    dtype: str
    window: int
    texts: tuple[TextUse, ...]
    versions: Mapping[str, str]
    inputs: Mapping[str, InputLayout]

    def to_json(self) -> str:
        data = {"format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(data, sort_keys=True, ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, path: Path, option: str) -> Description:
        """Raises ConfigError if the text is of another version, or not what `to_json` writes."""
        try:
            data = json.loads(text)
            version = data.pop("format_version")
            if version != FORMAT_VERSION:
                raise ConfigError(
                    f"statistics of format version {version}; this llmbuild reads {FORMAT_VERSION}",
                    where=f"{option} {path}",
                    hint="calibrate again, into a new file",
                )
            data["texts"] = tuple(TextUse(**text) for text in data["texts"])
            data["inputs"] = {
                key: InputLayout(value["columns"], tuple(value["weights"]), value["gram"])
                for key, value in data["inputs"].items()
            }
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(path, option, error) from error


class StatisticsWriter:
    """Writes a statistics file beside `path` and renames it once all inputs are in it; removes it on an error.

    The size of everything is known before anything is computed, so that inputs are written as they come.
    """

    def __init__(self, path: Path, description: Description) -> None:
        self.path, self.description = path, description
        self.partial = path.with_name(path.name + ".partial")
        self.places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self.missing = set(description.inputs)
        header: dict[str, object] = {"__metadata__": {METADATA: description.to_json()}}
        position = 0
        for name, dtype, shape in sorted(tensors(description.inputs), key=lambda t: (-t[1].itemsize, t[0])):
            size = torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
            self.places[name] = (position, dtype, shape)
            position += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 8)
        self.begin = len(text) + 8
        self.file = self.partial.open("wb")
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.file.truncate(self.begin + position)

    def __enter__(self) -> StatisticsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.file.close()
        if kind is None and not self.missing:
            self.partial.replace(self.path)
        else:
            self.partial.unlink()
        if kind is None and self.missing:
            raise AssertionError(f"no statistics of {', '.join(sorted(self.missing))}")

    def write(self, key: str, statistics: InputStatistics) -> None:
        exponent, sample = statistics.histogram.exponent, statistics.sample
        missing = ROWS - len(sample.rows)
        parts = {
            "total": statistics.total,
            "counts": statistics.histogram.counts,
            "rows": torch.tensor([statistics.rows, exponent is not None, exponent or 0, len(sample.rows)]),
            "absmax": statistics.absmax,
            "sample": torch.cat((sample.rows, sample.rows.new_zeros(missing, sample.rows.shape[1]))),
            "priorities": torch.cat((sample.priorities, sample.priorities.new_zeros(missing))),
        }
        if statistics.gram is not None:
            parts["gram"] = statistics.gram
        for part, value in parts.items():
            position, dtype, shape = self.places[f"{key}.{part}"]
            if value.dtype != dtype or tuple(value.shape) != shape:
                raise AssertionError(f"{key}.{part}: got {value.dtype} {tuple(value.shape)}, said {dtype} {shape}")
            self.file.seek(self.begin + position)
            self.file.write(value.contiguous().numpy().data)
        self.missing.remove(key)


def tensors(inputs: Mapping[str, InputLayout]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return name, dtype and shape of all tensors of a file."""
    found: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for key, layout in inputs.items():
        channels = (layout.columns,)
        found += [(f"{key}.total", torch.float64, channels), (f"{key}.absmax", torch.float32, channels)]
        found += [(f"{key}.counts", torch.int64, (BINS,)), (f"{key}.rows", torch.int64, (4,))]
        found += [(f"{key}.sample", torch.float32, (ROWS, layout.columns)), (f"{key}.priorities", torch.int64, (ROWS,))]
        if layout.gram:
            found.append((f"{key}.gram", torch.float32, (layout.columns, layout.columns)))
    return found


class StatisticsFile:
    """An existing file. Tensors are read when they are asked for."""

    def __init__(self, path: Path, option: str = "--calibration") -> None:
        """Raises ConfigError if `path`, which the user gave with `option`, is not a statistics file."""
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self.file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise _damaged(path, option, error) from error
        metadata = self.file.metadata() or {}
        if METADATA not in metadata:
            raise _damaged(path, option, "it has no llmbuild metadata")
        self.description = Description.from_json(metadata[METADATA], path, option)
        wanted = {name for name, _, _ in tensors(self.description.inputs)}
        if set(self.file.keys()) != wanted:
            raise _damaged(path, option, "its tensors are not those that its metadata describe")

    @cached_property
    def sha256(self) -> str:
        return sha256_file(self.path)

    def key_of(self, weight: str) -> str | None:
        """Return the key of the input that a weight of the checkpoint reads, or None if the file has no such input."""
        inputs = self.description.inputs.items()
        return next((key for key, layout in inputs if weight in layout.weights), None)

    def gram(self, key: str) -> Tensor:
        """Return the sum of xᵀx over all rows, float32 [K, K]."""
        tensor = self.file.get_tensor(f"{key}.gram")
        assert isinstance(tensor, Tensor)
        return tensor

    def mean(self, key: str) -> Tensor:
        """Return mean |x| of each channel, float64 [K]."""
        rows = int(self.file.get_tensor(f"{key}.rows")[0])
        total = self.file.get_tensor(f"{key}.total")
        assert isinstance(total, Tensor)
        return total / max(1, rows)

    def absmax(self, key: str) -> Tensor:
        """Return the largest |x| of each channel, float32 [K]."""
        tensor = self.file.get_tensor(f"{key}.absmax")
        assert isinstance(tensor, Tensor)
        return tensor

    def sample(self, key: str) -> Tensor:
        """Return some of the rows, float32 [n, K]."""
        tensor = self.file.get_tensor(f"{key}.sample")
        assert isinstance(tensor, Tensor)
        return tensor[: int(self.file.get_tensor(f"{key}.rows")[3])]

    def read(self, key: str) -> InputStatistics:
        """Return everything about one input."""
        layout = self.description.inputs[key]
        part = lambda name: self.file.get_tensor(f"{key}.{name}")  # noqa: E731
        rows, known, exponent, kept = part("rows").tolist()
        histogram = Histogram(part("counts"), exponent if known else None)
        sample = Sample(part("sample")[:kept], part("priorities")[:kept])
        gram = self.gram(key) if layout.gram else None
        return InputStatistics(rows, part("absmax"), part("total"), gram, sample, histogram)


def merge(paths: Sequence[Path], output: Path, option: str = "--from") -> None:
    """Write the statistics of all files together, as if their texts had been run in one calibration.

    Args:
        paths: In the order in which sums are added; that of floats makes the last bits.
        output: Written beside its place and renamed.
        option: What the user gives the paths with.

    Raises:
        ConfigError: The files are not of the same model and inputs, or two of them of the same text.
    """
    files = [StatisticsFile(path, option) for path in paths]
    for file in files[1:]:
        difference = difference_of(files[0].description, file.description)
        if difference is not None:
            raise ConfigError(
                f"statistics that differ cannot be merged: {difference}",
                where=f"{option} {files[0].path} {option} {file.path}",
                hint="calibrate both with the same model and options",
            )
    refuse_same_text(files, option)
    first = files[0].description
    texts = tuple(text for file in files for text in file.description.texts)
    together = Description(**{**vars(first), "texts": texts})
    with StatisticsWriter(output, together) as writer:
        for key in together.inputs:
            statistics = files[0].read(key)
            for file in files[1:]:
                statistics.merge(file.read(key))
            writer.write(key, statistics)


def difference_of(first: Description, second: Description) -> str | None:
    """Return in which way two descriptions are of different calibrations, or None if they can be added."""
    if first.model_sha256 != second.model_sha256:
        same = " (other files of it)" if first.model == second.model else ""
        return f"they are of the models {first.model} and {second.model}{same}"
    for name, what in (("dtype", "computed in"), ("window", "from windows of")):
        mine, its = getattr(first, name), getattr(second, name)
        if mine != its:
            return f"one is {what} {mine}, the other {its}"
    for key in sorted(first.inputs.keys() | second.inputs.keys()):
        mine, its = first.inputs.get(key), second.inputs.get(key)
        if mine is None or its is None:
            return f"only one knows the input of {key}: their graphs differ"
        if mine.gram != its.gram:
            return f"only one has a Gram matrix of the input of {key}: they were made for different recipes"
        if mine != its:
            return f"the input of {key} is another in each: their graphs differ"
    return None


def refuse_same_text(files: Sequence[StatisticsFile], option: str) -> None:
    """Raise ConfigError where a text would count twice."""
    seen: dict[str, Path] = {}
    for file in files:
        for text in file.description.texts:
            if text.sha256 in seen:
                raise ConfigError(
                    f"both files are of the text {text.name}, which would count twice",
                    where=f"{option} {seen[text.sha256]} {option} {file.path}",
                    hint="leave one of them out",
                )
        seen.update((text.sha256, file.path) for text in file.description.texts)


def _damaged(path: Path, option: str, why: object) -> ConfigError:
    return ConfigError(
        f"this is not a file of calibration statistics: {why}",
        where=f"{option} {path}",
        hint="give the path of one, as `llmbuild calibrate` writes it; convert's --calibration also takes a path that "
        "does not exist yet",
    )
