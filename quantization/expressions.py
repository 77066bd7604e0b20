"""Weights that are quantized or dequantized on demand: lazy, computed from another weight expression when loaded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.primitives import CHUNK, block_format, quantize_blocks
from llmbuild.quantization.recipes import WeightOnly


class Source(Protocol):
    """What is needed of the weight underneath; `builder.ir.WeightExpr` has it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def load(self) -> Tensor: ...

    def sources(self) -> frozenset[str]: ...

    def pieces(self, elements: int) -> Iterator[Tensor]: ...

    def held(self, elements: int) -> int: ...


def name_of(source: Source) -> str:
    """Return the checkpoint names of a weight, for errors."""
    return ", ".join(sorted(source.sources()))


@dataclass(frozen=True)
class Rounded(ABC):
    """`source` [N, K] in blocks, rounded some rows at a time. Nothing is kept between loads."""

    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @abstractmethod
    def load_blocks(self) -> BlockTensor:
        """Return all rows."""

    @abstractmethod
    def round_piece(self, piece: Tensor, first_row: int) -> BlockTensor:
        """Return some rows, `piece`, of which `first_row` is the number of the first."""

    def load(self) -> Tensor:
        return self.load_blocks().dequantize().to(self.dtype)

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (blocks.dequantize().to(self.dtype) for blocks in self.block_pieces(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        row = 0
        for piece in self.source.pieces(elements):
            yield self.round_piece(piece, row)
            row += piece.shape[0]


@dataclass(frozen=True)
class Quantized(Rounded):
    """`source` [N, K] rounded to nearest by `scheme`."""

    scheme: WeightOnly

    @property
    def block_format(self) -> BlockFormat:
        return block_format(self.scheme, self.shape[1])

    def load_blocks(self) -> BlockTensor:
        return self.round_piece(self.source.load(), 0)

    def round_piece(self, piece: Tensor, first_row: int) -> BlockTensor:
        return quantize_blocks(piece, self.scheme, name=name_of(self.source), first_row=first_row)

    def held(self, elements: int) -> int:
        columns = self.shape[1]
        piece = min(math.prod(self.shape), max(1, elements // columns) * columns)
        # q and its scales, and what rounding a chunk of it holds in float32.
        return self.source.held(elements) + 2 * piece + 6 * 4 * min(piece, max(CHUNK, columns))


@dataclass(frozen=True)
class Dequantized:
    """A weight stored in blocks, taken as a plain tensor."""

    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        return self.source.load()

    def load_blocks(self) -> BlockTensor:
        raise TypeError("a dequantized weight is a plain tensor")

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return self.source.pieces(elements)

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        columns = self.shape[1]
        # The float32 piece, and the scales spread over it.
        return self.source.held(elements) + 3 * 4 * min(math.prod(self.shape), max(1, elements // columns) * columns)
