"""Where values lie in memory between kernels: one dense row after the other, the token axis outermost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from llmbuild.builder.passes.edit import Size
from llmbuild.builder.targets.cuda.index import Index

SLOTS = "slots"


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory: a weight, an input of the step, the result of a GEMM, of attention or of a row program.

    name: of its node. shape: that node's; at most one axis is symbolic, the rows.
    rows: "T" (tokens), "L" (rows of logits), SLOTS (tokens of a layer's KV pool), None for weights.
    row_axis: which axis of `shape` holds the rows, None likewise. In memory it comes first, whatever its place.
    rows_each: entries along that axis for each token; more than 1 when a model folds another axis into the rows.
    """

    name: str
    dtype: torch.dtype
    shape: Size
    rows: str | None = None
    row_axis: int | None = None
    rows_each: int = 1

    @property
    def inner(self) -> Size:
        """The axes beside the rows."""
        return tuple(dim for place, dim in enumerate(self.shape) if place != self.row_axis)

    @property
    def width(self) -> int:
        """Elements for each token (of a weight: all of them): the row stride."""
        return self.rows_each * math.prod(int(dim) for dim in self.inner)

    def address(self, index: tuple[Index, ...]) -> Index:
        """Return where the element at `index` lies, in elements from the start."""
        flat, stride = Index(), 1
        for place in reversed(range(len(self.shape))):
            if place != self.row_axis:
                flat = flat + index[place] * stride
                stride *= int(self.shape[place])
        return flat if self.row_axis is None else index[self.row_axis] * stride + flat


@dataclass(frozen=True)
class Output:
    """What a row program leaves in memory: the value of `node`, in `buffer`.

    through: None, or the buffer of indices that says in which row of `buffer` a row lies: the slots of the KV pool.
    """

    node: fx.Node
    buffer: Buffer
    through: Buffer | None = None


@dataclass(frozen=True)
class View:
    """A strided tensor inside a buffer, read without moving it: strides and offset in elements, one stride an axis."""

    buffer: str
    offset: int
    shape: Size
    strides: tuple[int, ...]


def whole(buffer: Buffer) -> View:
    """Return all of a buffer as the tensor that it holds."""
    strides, stride = [0] * len(buffer.shape), 1
    for place in reversed(range(len(buffer.shape))):
        if place != buffer.row_axis:
            strides[place] = stride
            stride *= int(buffer.shape[place])
    if buffer.row_axis is not None:
        strides[buffer.row_axis] = stride
    return View(buffer.name, 0, buffer.shape, tuple(strides))
