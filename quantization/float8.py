"""Weights as 8-bit floats (e4m3) with scales: rounding, and lazy weights whose numbers a target reads as they are.

W[n, k] ≈ q[n, k] · scale[n // rows, k // columns]      block = (rows, columns); (1, K): one scale a row
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llmbuild.quantization.blocks import BlockTensor
from llmbuild.quantization.compensated import Statistics
from llmbuild.quantization.expressions import Source, name_of
from llmbuild.quantization.primitives import CHUNK, refuse_non_finite, usable

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0


class Float8Matrix(NamedTuple):
    """q: float8_e4m3fn [N, K]. scale: float32 [⌈N / rows⌉, ⌈K / columns⌉]."""

    q: Tensor
    scale: Tensor

    def dequantize(self, block: tuple[int, int]) -> Tensor:
        """Return the float32 [N, K] weight."""
        from llmbuild.plugins.scaled_ops import spread

        return spread(self.scale, block, self.q.shape).mul_(self.q.float())


def quantize_float8(weight: Tensor, block: tuple[int, int], *, name: str, first_row: int = 0) -> Float8Matrix:
    """Round `weight` [N, K], any float dtype, to the nearest numbers, ties to the even one.

    scale = max|W| / 448 of each block, so that the largest number of a block is exact; 1 where a block is all zero (or
    too small to divide by), whose numbers are then 0.

    Args:
        name, first_row: Of the tensor and of these rows in it, for the error.

    Raises:
        ModelError: `weight` holds NaN or infinity.
    """
    rows, columns = weight.shape
    down, across = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    q, scale = torch.empty(rows, columns, dtype=FLOAT8), torch.empty(down, across)
    step = max(1, CHUNK // (columns * block[0])) * block[0]
    for begin in range(0, rows, step):
        values = weight[begin : begin + step].float()
        refuse_non_finite(values, (values.amin(), values.amax()), first_row + begin, name)
        found = usable(largest(values, block) / LARGEST)
        first = begin // block[0]
        scale[first : first + len(found)] = found
        wide = found.repeat_interleave(block[0], 0)[: len(values)].repeat_interleave(block[1], 1)[:, :columns]
        q[begin : begin + step] = (values / wide).clamp_(-LARGEST, LARGEST).to(FLOAT8)
    return Float8Matrix(q, scale)


def largest(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block of float32 [N, K] values."""
    rows, columns = values.shape
    missing = (0, -columns % block[1], 0, -rows % block[0])
    padded = torch.nn.functional.pad(values, missing) if any(missing) else values
    return padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).abs().amax((1, 3))


@dataclass(frozen=True)
class InputScale:
    """The scale of all activations that a linear reads, float32 [1]: their largest magnitude in calibration / 448."""

    statistics: Statistics
    key: str
    shape: tuple[int, ...] = (1,)
    dtype: torch.dtype = torch.float32
    block_format: None = None

    def load(self) -> Tensor:
        return usable(self.statistics.absmax(self.key).amax().reshape(1).float() / LARGEST)

    def load_blocks(self) -> BlockTensor:
        raise TypeError("a scale is a plain tensor")

    def sources(self) -> frozenset[str]:
        return frozenset()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        yield self.load()

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        return 0


@dataclass(frozen=True)
class Float8Weight(ABC):
    """A weight [N, K] that is multiplied as 8-bit floats; read as a plain tensor it is what they stand for.

    source: the weight it comes from. block: see the module. input_scale: of the activations it is multiplied with, an
    expression of float32 [1]; None: each token has its own, or, in blocks, each `block[1]` channels of a token.
    input_label: tells input scales apart, for people too.
    """

    source: Source
    block: tuple[int, int]
    input_scale: Source | None = None
    input_label: str = "a scale a token"

    @abstractmethod
    def number_pieces(self, elements: int) -> Iterator[Float8Matrix]:
        """Yield rows in pieces of whole blocks, of about `elements` elements."""

    def part_pieces(self, part: str, elements: int) -> Iterator[Tensor]:
        """Yield the numbers ("q") or the scales ("scale") of the same pieces."""
        return (getattr(piece, part) for piece in self.number_pieces(elements))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def block_format(self) -> None:
        return None

    @property
    def label(self) -> str:
        """How it is held; only weights that agree in it can be one matrix."""
        shared = "a scale a row" if self.block[0] == 1 else f"blocks of {self.block[0]} x {self.block[1]}"
        return f"float8, {shared}; activations float8, {self.input_label}"

    def load(self) -> Tensor:
        return torch.cat(list(self.pieces(CHUNK)))

    def load_blocks(self) -> BlockTensor:
        raise TypeError("8-bit floats are not blocks of integers")

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (piece.dequantize(self.block).to(self.dtype) for piece in self.number_pieces(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        rows, columns = self.shape
        piece = min(rows, max(self.block[0], elements // columns)) * columns
        return self.source.held(elements) + 2 * piece + 5 * 4 * min(piece, max(CHUNK, self.block[0] * columns))

    def rows_at_once(self, elements: int) -> int:
        """Return how many rows, whole blocks of them, a piece of about `elements` elements has."""
        return max(1, elements // (self.shape[1] * self.block[0])) * self.block[0]


@dataclass(frozen=True)
class RoundedFloat8(Float8Weight):
    """`source` rounded to nearest."""

    def number_pieces(self, elements: int) -> Iterator[Float8Matrix]:
        row, name = 0, name_of(self.source)
        for piece in self.source.pieces(self.rows_at_once(elements) * self.shape[1]):
            yield quantize_float8(piece, self.block, name=name, first_row=row)
            row += piece.shape[0]


@dataclass(frozen=True)
class Float8Part:
    """The numbers or the scales of a `Float8Weight`: operands of `linear_scaled`."""

    weight: Float8Weight
    part: str  # "q" or "scale"

    @property
    def shape(self) -> tuple[int, ...]:
        (rows, columns), (down, across) = self.weight.shape, self.weight.block
        return (rows, columns) if self.part == "q" else (math.ceil(rows / down), math.ceil(columns / across))

    @property
    def dtype(self) -> torch.dtype:
        return FLOAT8 if self.part == "q" else torch.float32

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        return torch.cat(list(self.pieces(CHUNK)))

    def load_blocks(self) -> BlockTensor:
        raise TypeError("a part of a weight is a plain tensor")

    def sources(self) -> frozenset[str]:
        return self.weight.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (piece.contiguous() for piece in self.weight.part_pieces(self.part, elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        return self.weight.held(elements)
