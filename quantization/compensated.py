"""Weights that are rounded with what calibration knows of their inputs: lazy, as `quantization.expressions`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.expressions import Rounded, name_of
from llmbuild.quantization.gptq import Damped, Factor, factor, gptq_format, round_rows
from llmbuild.quantization.primitives import CHUNK
from llmbuild.quantization.recipes import Gptq


class Statistics(Protocol):
    """What is needed of calibration; `calibration.file.StatisticsFile` has it."""

    def gram(self, key: str) -> Tensor:
        """Return XᵀX of an input, float32 [K, K]."""
        ...

    def mean(self, key: str) -> Tensor:
        """Return mean |x| of each channel, float64 [K]."""
        ...

    def absmax(self, key: str) -> Tensor:
        """Return the largest |x| of each channel, float32 [K]."""
        ...

    def sample(self, key: str) -> Tensor:
        """Return some of the rows, float32 [n, K]."""
        ...


class LastFactor:
    """Remembers the factor made last: the weights that read one input (q, k, v) are rounded one after the other."""

    def __init__(self) -> None:
        self._held: tuple[Statistics, str, Damped, Factor] | None = None

    def of(self, statistics: Statistics, key: str, scheme: Damped) -> Factor:
        if self._held is not None and self._held[0] is statistics and self._held[1:3] == (key, scheme):
            return self._held[3]
        self._held = None  # free it before the next is made
        found = factor(statistics.gram(key), scheme, name=key)
        self._held = (statistics, key, scheme, found)
        return found

    def forget(self) -> None:
        """Free it. Call once all weights are written."""
        self._held = None


LAST_FACTOR = LastFactor()


@dataclass(frozen=True)
class Compensated(Rounded):
    """`source` [N, K] rounded by GPTQ, with the Gram matrix of the input called `key`."""

    scheme: Gptq
    statistics: Statistics
    key: str

    @property
    def block_format(self) -> BlockFormat:
        return gptq_format(self.scheme, self.shape[1])

    def load_blocks(self) -> BlockTensor:
        # Of the same pieces always: a product of another shape may round otherwise, and a level with it.
        pieces = list(self.block_pieces(CHUNK))
        offsets = [piece.offset for piece in pieces if piece.offset is not None]
        return BlockTensor(
            self.block_format,
            torch.cat([piece.q for piece in pieces]),
            torch.cat([piece.scale for piece in pieces]),
            torch.cat(offsets) if offsets else None,
        )

    def round_piece(self, piece: Tensor, first_row: int) -> BlockTensor:
        found = LAST_FACTOR.of(self.statistics, self.key, self.scheme)
        return round_rows(piece, self.scheme, found, name=name_of(self.source), first_row=first_row)

    def held(self, elements: int) -> int:
        columns = self.shape[1]
        piece = min(math.prod(self.shape), max(1, elements // columns) * columns)
        return self.source.held(elements) + factor_bytes(columns) + 5 * 4 * piece  # of a piece float32 copies


def factor_bytes(columns: int) -> int:
    """Return what making a factor holds: it and the Gram matrix, and three of their size in float64."""
    return (2 * 4 + 3 * 8) * columns**2
