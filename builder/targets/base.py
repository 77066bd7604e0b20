"""The target protocol: one class a target, one table of targets (`builder/targets/registry.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import fx

from llmbuild.builder.ir import Program


@dataclass(frozen=True)
class Limits:
    """What an engine is built for. All are upper bounds checked at admission.

    max_batch_size: sequences in one step. max_num_tokens: tokens in one step (decode + prefill chunks).
    max_seq_len: tokens of one sequence, prompt and output. block_size: tokens per KV block.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    block_size: int = 16


@dataclass(frozen=True)
class CompileOptions:
    """dtype: computation dtype name ("float32"). progress(done, total, label): called while weights are written.

    sm: kinds of GPU, "80,90"; None for all that are known. Only for targets that compile for GPUs.
    builder_options: "NAME=VALUE" each, for targets whose builder is the vendor's.
    """

    limits: Limits
    dtype: str
    progress: Callable[[int, int, str], None] | None = None
    sm: str | None = None
    builder_options: tuple[str, ...] = ()


@dataclass
class CompiledTarget:
    """What `compile` leaves behind besides files: the target's section of `engine.json` and lines for the report.

    requires: package -> version range checked at load, e.g. {"onnxruntime": ">=1.32,<2"}.
    toolchain: package -> version that built it.
    section: target-specific JSON values the executor needs (file names, input order). Deterministic.
    weight_bytes: bytes of weights by storage format ("float32", "Q4_1"), for the report.
    block_size: tokens a KV block of this engine, where the target does not take what the limits say.
    """

    requires: dict[str, str]
    toolchain: dict[str, str]
    section: dict[str, Any]
    weight_bytes: dict[str, int] = field(default_factory=dict)
    block_size: int | None = None


class Target(Protocol):
    """name: as in the table of targets. dtypes: names of what it can compute in, the default first.

    kv_caches: those of `recipes.KV_CACHES` that it has.
    """

    name: str
    dtypes: tuple[str, ...]
    kv_caches: tuple[str, ...]

    def probe(self) -> str | None:
        """Return None when this target can build here, else the reason and what to install."""
        ...

    def supports(self, node: fx.Node) -> str | None:
        """Return None when `node` can be lowered, else why not."""
        ...

    def compile(self, program: Program, options: CompileOptions, directory: Path) -> CompiledTarget:
        """Write `plan/` and `weights/` below `directory` (an empty staging folder). Deterministic bytes.

        Raises:
            UnsupportedError: naming all nodes that cannot be lowered, before anything is written.
        """
        ...
