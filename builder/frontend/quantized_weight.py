"""A weight of a quantized checkpoint: several tensors that a format's layout makes one matrix of, rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbuild.builder.weights import WeightExpr, piece_size, rows_at_once
from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.formats import Layout
from llmbuild.quantization.integers import Integers


@dataclass(frozen=True, eq=False)  # the passes compare weights; a checkpoint has one object a weight
class QuantizedWeight:
    """A `WeightExpr`. Dequantized values are float32, each rounded once.

    Args:
        name: What it is called in the model's terms, "….weight", whatever its tensors are called.
        layout: How the parts make a matrix.
        parts: Last word of the name ("qweight") -> tensor.
    """

    name: str
    layout: Layout
    parts: dict[str, WeightExpr]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def block_format(self) -> BlockFormat | None:
        return self.layout.block_format

    def load(self) -> Tensor:
        return self._plain(0, self.shape[0])

    def load_blocks(self) -> BlockTensor:
        return self._blocks(0, self.shape[0])

    def sources(self) -> frozenset[str]:
        return frozenset((self.name,))

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (self._plain(begin, end) for begin, end in self._ranges(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        return (self._blocks(begin, end) for begin, end in self._ranges(elements))

    def held(self, elements: int) -> int:
        piece = piece_size(self.shape, elements)
        stored = sum(math.prod(part.shape) * part.dtype.itemsize for part in self.parts.values())
        if self.layout.row_major:  # else every row lies in all pages of the file
            stored = -(-stored * piece // math.prod(self.shape))
        # Integers while they are unpacked, scales spread over columns, and float32 values in between.
        return stored + 20 * piece

    def _ranges(self, elements: int) -> Iterator[tuple[int, int]]:
        rows, step = self.shape[0], rows_at_once(self.shape, elements)
        return ((begin, min(begin + step, rows)) for begin in range(0, rows, step))

    def _rows(self, begin: int, end: int) -> Integers | Tensor:
        # Mapped anew for every piece, so that the pages of one leave the process with it.
        return self.layout.rows({name: part.load() for name, part in self.parts.items()}, begin, end)

    def _plain(self, begin: int, end: int) -> Tensor:
        rows = self._rows(begin, end)
        return rows.dequantize() if isinstance(rows, Integers) else rows

    def _blocks(self, begin: int, end: int) -> BlockTensor:
        rows, form = self._rows(begin, end), self.block_format
        if form is None or not isinstance(rows, Integers):
            raise TypeError(f"{self.layout.label}: no blocks hold this weight")
        return rows.to_blocks(form)
