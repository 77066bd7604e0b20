"""GPTQ: what rounding a column loses is made up for by the columns that come after it.

For each row w of a weight, GPTQ looks for levels ŵ that keep (w - ŵ)·G·(w - ŵ)ᵀ small, with G = XᵀX of the linear's
inputs: the square error of the linear's outputs. With U the upper Cholesky factor of (G + λ·I)⁻¹, columns are rounded
from first to last, and after column j, with e = (w_j - ŵ_j) / U_jj,

    w_k -= e · U_jk        for all k > j

Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (ICLR 2023), equations 2 and 3 and algorithm 1: columns in blocks, whose errors reach the columns after
the block in one product. λ is `damping` times the mean of G's diagonal. A G without off-diagonal values moves nothing:
the result is then that of rounding to nearest, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from llmbuild.errors import ModelError
from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.primitives import block_format, block_scales, to_levels
from llmbuild.quantization.recipes import Gptq

COLUMNS = 128  # whose errors are kept before the columns after them are corrected


class Damped(Protocol):
    """What a factor depends on: `recipes.Gptq` and `recipes.Compensation` have it."""

    @property
    def damping(self) -> float: ...

    @property
    def act_order(self) -> bool: ...


@dataclass(frozen=True)
class Factor:
    """order: in which columns are rounded, int64 [K]. upper: U of the columns in that order, float32 [K, K]."""

    order: Tensor
    upper: Tensor


def gptq_format(scheme: Gptq, columns: int) -> BlockFormat:
    """Return the format that `scheme` gives a matrix of `columns` input channels."""
    return replace(block_format(scheme.rounding, columns), source=str(scheme))


def factor(gram: Tensor, scheme: Damped, *, name: str) -> Factor:
    """Return what rounding needs of the Gram matrix.

    Args:
        gram: XᵀX, float32 [K, K]. Not changed.
        name: Of the input, for the error.

    Raises:
        ModelError: The damped matrix is not positive definite, or not finite.
    """
    diagonal = gram.diagonal()
    order = torch.arange(len(gram))
    if scheme.act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    matrix = gram[order][:, order].double()
    mean = float(matrix.diagonal().mean())
    if mean == 0:  # nothing ever came in: any rounding is as good as another
        return Factor(order, torch.eye(len(gram)))
    matrix.diagonal().add_(scheme.damping * mean)
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if not int(failed):
        del matrix
        inverse = torch.cholesky_inverse(lower)
        del lower
        lower, failed = torch.linalg.cholesky_ex(inverse)
    if int(failed) or not bool(torch.isfinite(lower).all()):
        raise ModelError(
            f"the Gram matrix of the input of {name!r} has no Cholesky factor",
            where=f"GPTQ with a damping of {scheme.damping}",
            hint="calibrate with more text, or exclude this layer",
        )
    return Factor(order, lower.T.float().contiguous())


def round_rows(weight: Tensor, scheme: Gptq, found: Factor, *, name: str, first_row: int = 0) -> BlockTensor:
    """Round rows of a weight. A row's result does not depend on the other rows.

    Args:
        weight: Any float dtype, [N, K].
        found: Of the linear's inputs.
        name: The tensor's name, for the error.
        first_row: Where these rows begin in the tensor of that name.

    Raises:
        ModelError: As `primitives.quantize_blocks`.
    """
    rows, columns = weight.shape
    form = gptq_format(scheme, columns)
    size = form.block_size
    original = weight.float()
    scale, offset = block_scales(original, form, name=name, first_row=first_row)
    left = original[:, found.order].contiguous()  # what is still to be rounded, corrected
    q = torch.empty(rows, columns, dtype=torch.uint8)
    width = columns_at_once(size, columns)
    for begin in range(0, columns, width):
        end = min(begin + width, columns)
        errors = torch.empty(rows, end - begin)
        for place in range(begin, end):
            column = int(found.order[place])
            group = column // size
            if not scheme.act_order and column % size == 0:  # the group's range, as corrections have left it
                values = left[:, column : column + size]
                alone = replace(form, block_size=values.shape[1])
                one_scale, low = block_scales(values, alone, name=name, first_row=first_row)
                scale[:, group] = one_scale[:, 0]
                if offset is not None and low is not None:
                    offset[:, group] = low[:, 0]
            step, base = scale[:, group], None if offset is None else offset[:, group]
            level = to_levels(left[:, place], step, base, form)
            q[:, column] = level.to(torch.uint8)
            rounded = step * (level - form.zero)
            if base is not None:
                rounded = rounded + base
            error = (left[:, place] - rounded) / found.upper[place, place]
            errors[:, place - begin] = error
            left[:, place + 1 : end] -= error[:, None] * found.upper[place, place + 1 : end]
        left[:, end:] -= errors @ found.upper[begin:end, end:]
    return BlockTensor(form, q, scale, offset)


def columns_at_once(size: int, columns: int) -> int:
    """Return how many columns share one product, so that a group begins only where no correction is outstanding.

    Corrections inside of a block are made at once only up to the block's end: groups must not reach across it.
    """
    if size >= columns:
        return COLUMNS  # one group, whose range is taken before anything is corrected
    if size >= COLUMNS:
        return COLUMNS if size % COLUMNS == 0 else size
    return COLUMNS // size * size


def output_error(weight: Tensor, blocks: BlockTensor, gram: Tensor) -> float:
    """Return ‖X·(W - Ŵ)ᵀ‖², the square error of the linear's outputs, from XᵀX."""
    lost = weight.double() - blocks.dequantize().double()
    return float((lost @ gram.double() * lost).sum())
