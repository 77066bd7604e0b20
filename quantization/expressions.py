"""Weights that are quantized or dequantized on demand: lazy, computed from another weight expression when loaded."""

from __future__ import annotations

import math
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
class Quantized:
    """`source` [N, K] rounded to nearest by `scheme`. Nothing is kept between loads."""

    source: Source
    scheme: WeightOnly

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def block_format(self) -> BlockFormat:
        return block_format(self.scheme, self.shape[1])

    def load(self) -> Tensor:
        return self.load_blocks().dequantize().to(self.dtype)

    def load_blocks(self) -> BlockTensor:
        return quantize_blocks(self.source.load(), self.scheme, name=name_of(self.source))

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (blocks.dequantize().to(self.dtype) for blocks in self.block_pieces(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        row = 0
        for piece in self.source.pieces(elements):
            yield quantize_blocks(piece, self.scheme, name=name_of(self.source), first_row=row)
            row += piece.shape[0]

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
