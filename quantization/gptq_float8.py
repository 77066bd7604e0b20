"""GPTQ on 8-bit floats: what rounding a column to e4m3 loses is made up for by the columns that come after it.

As `quantization.gptq`, equation and source there, with two differences: levels are not evenly spaced, and a row's scale
is that of rounding to nearest, max|W| / 448, so that a product reads both alike. A column that corrections have made
larger than the row's largest number becomes that number, and the columns after it make up for this too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmbuild.quantization.compensated import LAST_FACTOR, Statistics, factor_bytes
from llmbuild.quantization.expressions import name_of
from llmbuild.quantization.float8 import FLOAT8, LARGEST, Float8Matrix, Float8Weight, quantize_float8
from llmbuild.quantization.gptq import COLUMNS, Factor
from llmbuild.quantization.recipes import Compensation


def round_float8_rows(weight: Tensor, found: Factor, *, name: str, first_row: int = 0) -> Float8Matrix:
    """Round rows of a weight. A row's result does not depend on the other rows.

    Args:
        weight: Any float dtype, [N, K].
        found: Of the linear's inputs.
        name, first_row: Of the tensor and of these rows in it, for the error.

    Raises:
        ModelError: `weight` holds NaN or infinity.
    """
    rows, columns = weight.shape
    scale = quantize_float8(weight, (1, columns), name=name, first_row=first_row).scale
    left = weight.float()[:, found.order].contiguous()  # what is still to be rounded, corrected
    q = torch.empty(rows, columns, dtype=FLOAT8)
    for begin in range(0, columns, COLUMNS):
        end = min(begin + COLUMNS, columns)
        errors = torch.empty(rows, end - begin)
        for place in range(begin, end):
            level = (left[:, place] / scale[:, 0]).clamp_(-LARGEST, LARGEST).to(FLOAT8)
            q[:, int(found.order[place])] = level
            error = (left[:, place] - level.float() * scale[:, 0]) / found.upper[place, place]
            errors[:, place - begin] = error
            left[:, place + 1 : end] -= error[:, None] * found.upper[place, place + 1 : end]
        left[:, end:] -= errors @ found.upper[begin:end, end:]
    return Float8Matrix(q, scale)


@dataclass(frozen=True)
class CompensatedFloat8(Float8Weight):
    """`source` [N, K], one scale a row, rounded by GPTQ with the Gram matrix of the input called `key`."""

    compensation: Compensation = field(kw_only=True)
    statistics: Statistics = field(kw_only=True)
    key: str = field(kw_only=True)

    def number_pieces(self, elements: int) -> Iterator[Float8Matrix]:
        row, name = 0, name_of(self.source)
        for piece in self.source.pieces(self.rows_at_once(elements) * self.shape[1]):
            found = LAST_FACTOR.of(self.statistics, self.key, self.compensation)
            yield round_float8_rows(piece, found, name=name, first_row=row)
            row += piece.shape[0]

    def part_pieces(self, part: str, elements: int) -> Iterator[Tensor]:
        if part == "q":
            yield from super().part_pieces(part, elements)
            return
        row, name = 0, name_of(self.source)  # scales are known before anything is rounded
        for piece in self.source.pieces(self.rows_at_once(elements) * self.shape[1]):
            yield quantize_float8(piece, self.block, name=name, first_row=row).scale
            row += piece.shape[0]

    def held(self, elements: int) -> int:
        return super().held(elements) + factor_bytes(self.shape[1])
