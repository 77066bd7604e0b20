"""What a lowering rule is, and the helpers that rules share."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import dtype
from llmbuild.builder.targets.onnx_graph.emitter import ONNX_TYPES, Emitter, Value, numpy_dtype

INT64_MAX = torch.iinfo(torch.int64).max


def anything(node: fx.Node) -> str | None:
    return None


@dataclass(frozen=True)
class Rule:
    """emit: append operators for a node, return its ONNX name(s). check: None, or why it cannot be lowered."""

    emit: Callable[[Emitter, fx.Node], Value]
    check: Callable[[fx.Node], str | None] = anything


def onnx_shape(sizes: Any) -> list[int] | None:
    """Return `sizes` with at most one -1 for the token axis, or None when two axes are symbolic."""
    dims = [int(s) if isinstance(s, int) else -1 for s in sizes]
    return dims if dims.count(-1) <= 1 else None


def cast(e: Emitter, name: str, have: torch.dtype, want: torch.dtype) -> str:
    return name if have == want else e.op("Cast", name, to=ONNX_TYPES[want])


def operand(e: Emitter, value: Any, want: torch.dtype) -> str:
    """Return the ONNX name of a tensor or number argument, in dtype `want` (torch promotes; ONNX does not)."""
    if isinstance(value, fx.Node):
        return cast(e, e.tensor(value), dtype(value), want)
    return e.constant(value, numpy_dtype(want))


def reshape(e: Emitter, name: str, *dims: int) -> str:
    """Append a Reshape. A dimension of 0 copies, -1 takes what is left."""
    return e.op("Reshape", name, e.ints(*dims))


def unknown_dtype(node: fx.Node, known: Container[torch.dtype]) -> torch.dtype | None:
    """Return the dtype of a node's value that is not among those `known`, or None."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else [value]
    found = (tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor))
    return next((dtype for dtype in found if dtype not in known), None)


def is_size(node: fx.Node) -> bool:
    """Whether a node computes a size, or asserts something about sizes: shapes are known without it."""
    value = node.meta.get("val")
    return not isinstance(value, (torch.Tensor, tuple, list))
