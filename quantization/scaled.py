"""Weights whose input channels are held larger or smaller, and what feeds them the other way round.

With one positive s for each input channel, W·x = (W·diag(s))·(diag(s)⁻¹·x). diag(s)⁻¹ goes into what makes x, so that
the graph stays as it is (`builder.passes.scale_inputs`). Which s is best is searched by AWQ (`awq`) and by SmoothQuant
(`smooth`), each on rows of x that calibration kept and on some rows of the weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llmbuild.quantization.blocks import BlockTensor
from llmbuild.quantization.compensated import Statistics
from llmbuild.quantization.expressions import Source, name_of
from llmbuild.quantization.primitives import refuse_non_finite

PIECE = 1 << 22  # elements of a weight that are read at once
TRIED_ROWS = 512  # of all weights that read the input together; more change which s is best no more


@dataclass(frozen=True)
class SomeRows:
    """Of weights that read one input. rows: float32 [n, K], evenly chosen. absmax: largest |w| of all rows, [K]."""

    rows: Tensor
    absmax: Tensor


def some_rows(sources: Sequence[Source], most: int = TRIED_ROWS) -> SomeRows:
    """Read the weights [N, K] piece by piece and keep every so many-th row.

    Raises:
        ModelError: A weight holds NaN or infinity.
    """
    step = -(-sum(source.shape[0] for source in sources) // most)
    absmax, kept, number = torch.zeros(sources[0].shape[1]), [], 0
    for source in sources:
        row = 0
        for piece in source.pieces(PIECE):
            values = piece.float()
            low, high = torch.aminmax(values, dim=0)  # NaN and infinity show in them
            refuse_non_finite(values, (low, high), row, name_of(source))
            absmax = torch.maximum(absmax, torch.maximum(-low, high))
            kept.append(values[-number % step :: step].clone())
            row += len(values)
            number += len(values)
    return SomeRows(torch.cat(kept), absmax)


class ScaleSearch(ABC):
    """The scales of one input, searched when they are first asked for and then kept (K floats).

    Args:
        sources: Weights of all linears that read the input.
        statistics, key: Of the input.
    """

    def __init__(self, sources: tuple[Source, ...], statistics: Statistics, key: str) -> None:
        self.sources, self.statistics, self.key = sources, statistics, key

    @cached_property
    def scales(self) -> Tensor:
        """The best s, float32 [K]."""
        return self.search(self.statistics.sample(self.key), some_rows(self.sources))

    @abstractmethod
    def search(self, x: Tensor, weights: SomeRows) -> Tensor:
        """Return the best s of those that are tried. x: rows of the input, float32 [n, K]."""

    def held(self) -> int:
        """Return how many bytes a search needs at most: rows of x and of the weights, in float32 a few times over."""
        columns = self.sources[0].shape[1]
        piece = max(min(math.prod(source.shape), max(PIECE, columns)) for source in self.sources)
        return max(source.held(PIECE) for source in self.sources) + 4 * (3 * piece + 8 * TRIED_ROWS * columns)


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
