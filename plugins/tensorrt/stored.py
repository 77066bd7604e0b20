"""A kernel that TensorRT stores in an engine and launches by itself, on its way from the builder: code and launch."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import field_validator

from llmbuild.engine.expressions import parse
from llmbuild.engine.manifest import Bytes, Count, Section

MOST_SHARED = 48 << 10  # bytes of shared memory that a kernel gets whose launcher does not ask for more


class StoredKernel(Section):
    """Parameters of the kernel: pointers to the node's inputs, `numbers` (int32), pointers to its outputs.

    ptx: of the one kernel `symbol`. grid, numbers: expressions in T and B, the sizes of the node's inputs.
    threads, shared: of a block; shared memory in bytes.
    """

    version: Literal[1] = 1
    symbol: str
    ptx: str
    grid: tuple[str, str, str]
    numbers: tuple[str, ...]
    threads: Count
    shared: Bytes

    @field_validator("grid", "numbers")
    @classmethod
    def _legal(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if strange := parse(text).names - {"T", "B"}:
                raise ValueError(f"a size in {', '.join(sorted(strange))}")
        return texts

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(self.compact_json()).hexdigest()
