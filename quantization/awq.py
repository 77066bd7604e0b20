"""AWQ: channels that large inputs meet are rounded on a finer grid.

With one positive s for each input channel, W·x = (W·diag(s))·(diag(s)⁻¹·x). Rounding W·diag(s) instead of W moves
error from channels with a large s to others. Of s = mean|x| ** α, the α in 0 .. 1 is taken that loses least,

    ‖X·(W - Q(W·diag(s))·diag(s)⁻¹)ᵀ‖²        summed over all linears that read x

and α = 0, which is rounding to nearest, is among those tried. diag(s)⁻¹ goes into what makes x, so that the graph stays
as it is (`builder.passes.scale_inputs`).

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han, "AWQ: Activation-aware Weight Quantization for On-Device LLM
Compression and Acceleration" (MLSys 2024), equations 4 and 5. The loss is taken from XᵀX, over all rows of calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llmbuild.quantization.blocks import BlockTensor
from llmbuild.quantization.compensated import Statistics
from llmbuild.quantization.expressions import Source, name_of
from llmbuild.quantization.primitives import quantize_blocks
from llmbuild.quantization.recipes import Awq

PIECE = 1 << 22  # elements of a weight that are tried at once
LEAST = 1e-4  # of mean |x|: channels without inputs are not scaled to nothing


def candidates(mean: Tensor, steps: int) -> list[Tensor]:
    """Return the scales for α = 0, 1/steps, .. 1, float32 [K] each, from mean |x| [K]. The first are exactly 1.

    They are divided by the geometric mean of the largest and the smallest, so that weights stay about as large.
    """
    found = [torch.ones(len(mean))]
    for step in range(1, steps + 1):
        scales = mean.double().clamp(min=LEAST) ** (step / steps)
        found.append((scales / (scales.max() * scales.min()).sqrt()).float())
    return found


def lost(weight: Tensor, scales: Tensor, scheme: Awq, gram: Tensor, *, name: str, first_row: int = 0) -> float:
    """Return the square error of a linear's outputs when rows of its weight are rounded after scaling."""
    blocks = quantize_blocks(weight * scales, scheme.rounding, name=name, first_row=first_row)
    error = weight - blocks.dequantize() / scales
    return float((error @ gram * error).double().sum())


def search(pieces: Iterator[tuple[str, int, Tensor]], scheme: Awq, gram: Tensor, mean: Tensor) -> Tensor:
    """Return the scales that lose least, float32 [K]; ones where none loses less than rounding to nearest.

    Args:
        pieces: (name, first row, rows of a weight) of all linears that read the input.
        gram: XᵀX of the input, float32 [K, K]. mean: mean |x|, [K].

    Raises:
        ModelError: As `primitives.quantize_blocks`.
    """
    tried = candidates(mean, scheme.steps)
    losses = [0.0] * len(tried)
    for name, row, piece in pieces:
        weight = piece.float()
        for place, scales in enumerate(tried):
            losses[place] += lost(weight, scales, scheme, gram, name=name, first_row=row)
    return tried[losses.index(min(losses))]


class ScaleSearch:
    """The scales of one input, searched when they are first asked for and then kept (K floats).

    Args:
        sources: Weights of all linears that read the input.
        statistics, key: Of the input.
    """

    def __init__(self, sources: tuple[Source, ...], scheme: Awq, statistics: Statistics, key: str) -> None:
        self.sources, self.scheme, self.statistics, self.key = sources, scheme, statistics, key

    @cached_property
    def scales(self) -> Tensor:
        gram, mean = self.statistics.gram(self.key), self.statistics.mean(self.key)
        return search(self._pieces(), self.scheme, gram, mean)

    def _pieces(self) -> Iterator[tuple[str, int, Tensor]]:
        for source in self.sources:
            row = 0
            for piece in source.pieces(PIECE):
                yield name_of(source), row, piece
                row += piece.shape[0]

    def held(self) -> int:
        """Return how many bytes a search needs at most: the Gram matrix, and a piece in float32 a few times over."""
        columns = self.sources[0].shape[1]
        piece = max(min(math.prod(source.shape), max(PIECE, columns)) for source in self.sources)
        return max(source.held(PIECE) for source in self.sources) + 4 * columns**2 + 8 * 4 * piece


@dataclass(frozen=True)
class Scaled:
    """`source` multiplied by the scales along its columns, or divided by them along its rows (or as a vector).

    Columns are scaled in float32, to be rounded after that; what is divided keeps its dtype.
    """

    source: Source
    scales: ScaleSearch
    columns: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.columns else self.source.dtype

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        return self._apply(self.source.load(), 0)

    def load_blocks(self) -> BlockTensor:
        raise TypeError("a scaled weight is a plain tensor")

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        row = 0
        for piece in self.source.pieces(elements):
            yield self._apply(piece, row)
            row += piece.shape[0]

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        piece = min(math.prod(self.shape), max(elements, self.shape[-1]))
        return self.source.held(elements) + self.scales.held() + 2 * 4 * piece

    def _apply(self, rows: Tensor, first: int) -> Tensor:
        if self.columns:
            return rows.float() * self.scales.scales
        scales = self.scales.scales[first : first + rows.shape[0]]
        return (rows.float() / (scales[:, None] if rows.ndim == 2 else scales)).to(rows.dtype)
