"""What is known about a model before it is traced, whatever form it came in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from llmbuild.builder.frontend.checkpoint import Checkpoint
from llmbuild.builder.ir import WeightExpr


@dataclass(frozen=True)
class ModelSource:
    """Everything at the user's path except the weights' data.

    Attributes:
        name: Name for reports.
        config: transformers config.
        checkpoint: Weights by name.
        generation: Contents of `generation_config.json`, or {}.
        tokenizer_files: For `Program.tokenizer_files`.
        files: Every file read.
        rope_factors: Divisors of the rotary frequencies [D/2] that the config cannot express, or None.
        notices: Facts about the config for the report.
        quantized: Name of the format of a quantized checkpoint, None for others.
        cache_scales: Of such a checkpoint, `QuantizedCheckpoint.cache_scales`.
        scattered: Weights of such a checkpoint that no blocks hold, `QuantizedCheckpoint.scattered`.
    """

    name: str
    config: PretrainedConfig
    checkpoint: Checkpoint
    generation: dict[str, Any]
    tokenizer_files: dict[str, bytes]
    files: tuple[Path, ...]
    rope_factors: Tensor | None = None
    notices: tuple[str, ...] = ()
    quantized: str | None = None
    scattered: tuple[str, ...] = ()
    cache_scales: tuple[tuple[WeightExpr, WeightExpr], ...] = ()
