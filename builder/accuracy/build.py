"""What `build()` does about accuracy: keep the unquantized program, compare, fail or write the record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.builder.accuracy.quantized import DEFAULT_TOKENS, Measured, Progress, evaluation_windows, measure
from llmbuild.builder.accuracy.record import Thresholds, check
from llmbuild.builder.accuracy.walk import copy_program
from llmbuild.builder.ir import Program
from llmbuild.builder.options import BuildConfig
from llmbuild.builder.pipeline import LAST_EXACT
from llmbuild.engine.manifest import ACCURACY_PLOT_NAME

if TYPE_CHECKING:
    from llmbuild.builder.targets.base import Limits


class MeasuredBuild:
    """The accuracy of one build.

    Args:
        config: With thresholds or a text.
        quant: Name of the recipe.
        quantized_cache: Whether the KV cache is not in the computation dtype.
    """

    def __init__(self, config: BuildConfig, quant: str, *, quantized_cache: bool) -> None:
        self.config = config
        self.quant = quant
        self.quantized_cache = quantized_cache
        self.thresholds = Thresholds(**config.thresholds)
        self.reference: Program | None = None
        self.measured: Measured | None = None

    def after_pass(self, name: str, program: Program) -> None:
        """Keep the program as it is before its weights are quantized. Given to `optimize`."""
        if name == LAST_EXACT:
            self.reference = copy_program(program)

    def run(self, program: Program, limits: Limits, progress: Progress) -> None:
        """Compare the optimised program with the one kept.

        Raises:
            AccuracyError: It misses a threshold, or its logits are no distribution.
            ConfigError: The text cannot be used.
        """
        assert self.reference is not None
        info, tokens = program.info, self.config.accuracy_tokens
        text, windows = evaluation_windows(
            self.config.accuracy_text,
            program.tokenizer_files.get("tokenizer.json"),
            tokens=DEFAULT_TOKENS if tokens is None else tokens,
            length=min(limits.max_seq_len, info.max_position_embeddings),
            vocab_size=info.vocab_size,
            bos_token_id=info.bos_token_id,
            option="--accuracy-text",
        )
        max_memory = self.config.memory_limit
        self.measured = measure(self.reference, program, text, windows, max_memory=max_memory, progress=progress)
        self.reference = None  # its weights are not held while the engine's are written
        figures, layers = self.measured.figures, self.measured.layers
        check(self.thresholds, figures, layers, self.quant, quantized_cache=self.quantized_cache)

    def write(self, directory: Path) -> dict[str, Any]:
        """Write `accuracy.svg` into an engine and return the record for `report.json`."""
        assert self.measured is not None
        (directory / ACCURACY_PLOT_NAME).write_text(self.measured.svg(self.quant), encoding="utf-8")
        return {**self.measured.to_dict(), "thresholds": self.thresholds.to_dict()}
