"""What a checkpoint must offer, whatever format it is stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from llmbuild.builder.ir import WeightExpr


class Checkpoint(Protocol):
    """Tensors by name. Opening reads headers only; data are read one tensor at a time, through `weight(name).load()`.

    Attributes:
        kind: "huggingface" or "gguf".
        files: Every file that weights come from, in a fixed order.
        notices: Facts the user should see, such as files that were ignored.
    """

    kind: str
    files: tuple[Path, ...]
    notices: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted. For GGUF these are already translated to Hugging Face names."""
        ...

    def weight(self, name: str) -> WeightExpr:
        """Return the lazy tensor `name`: shape and dtype without reading data. The same object at every call.

        Raises:
            KeyError: there is no such tensor.
        """
        ...
