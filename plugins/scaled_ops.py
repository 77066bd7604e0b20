"""Products of 8-bit numbers: schema, fake and plain reference of `quantize_rows` and `linear_scaled`.

Importing this module registers them beside `llmbuild.plugins.ops`. A row is a token's, or a group of its channels where
the value was reshaped to [T, K / 128, 128] before. Both ops serve FP8 and INT8:

    x ── quantize_rows ──┬ q [T, K], float8_e4m3fn or int8 ──┐
                         └ scale [T, 1], float32 ────────────┴ linear_scaled ── y = Σ_k q·w · scale[t]·w_scale[n] + bias
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

LIB = torch.library.Library("llmbuild", "FRAGMENT")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # magnitude of what a number can be
# Exactly what a kernel in float32 multiplies with.
INVERSE = {dtype: float(np.float32(1) / np.float32(largest)) for dtype, largest in LARGEST.items()}
TINY = float(np.finfo(np.float32).tiny)


def _define(schema: str) -> None:
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


_define("quantize_rows(Tensor x, Tensor? scale, ScalarType dtype) -> (Tensor, Tensor)")
# x [..., K] -> q [..., K] of dtype, float8_e4m3fn or int8, and scales float32 [..., 1], with x ≈ q · scale. Along the
# last axis: scale = max|x| / 448 (127), 1 where that is 0 or too small to divide by. With `scale`, float32 [1], that is
# the scale of all rows, and what lies beyond the largest number becomes it. Ties go to the even number. NaN stays NaN
# in float8, and makes the scale of an int8 row NaN; with one `scale` for all it counts as 0 in int8.


def quantize_rows(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = x.float()
    if scale is None:
        found = values.abs().amax(-1, keepdim=True) * INVERSE[dtype]
        scales = torch.where(found < TINY, torch.ones_like(found), found)  # NaN stays
    else:
        scales = scale.float().reshape(1).expand(*x.shape[:-1], 1).contiguous()
    return rounded(values * (1.0 / scales), dtype), scales


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values as the nearest numbers of `dtype`; NaN stays NaN in float8 and is 0 in int8."""
    inside = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (inside.nan_to_num(0).round() if dtype == torch.int8 else inside).to(dtype)


torch.library.impl("llmbuild::quantize_rows", "CompositeExplicitAutograd")(quantize_rows)


@torch.library.register_fake("llmbuild::quantize_rows")
def _(x, scale, dtype):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


_define("linear_numbers(Tensor x, Tensor w, ScalarType dtype) -> Tensor")
# x [..., K] and w [N, K], both float8_e4m3fn -> [..., N] of dtype: `linear_scaled` before its scales, for the cuda
# target.


@torch.library.impl("llmbuild::linear_numbers", "CompositeExplicitAutograd")
def _(x, w, dtype):
    return (x.float() @ w.float().T).to(dtype)


@torch.library.register_fake("llmbuild::linear_numbers")
def _(x, w, dtype):
    return x.new_empty(*x.shape[:-1], w.shape[0], dtype=dtype)


_define(
    "linear_scaled(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? bias, int[] block, ScalarType dtype) "
    "-> Tensor"
)
# x [..., K] and w [N, K], both float8_e4m3fn or both int8 -> [..., N] of dtype, accumulated in float32 or, of integers,
# exactly. block: rows and columns of w that share a scale, [1, K] for one a row. w_scale float32 [⌈N / block[0]⌉,
# ⌈K / block[1]⌉]; x_scale float32 [..., K / block[1]].


def linear_scaled(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, block: list[int], dtype: torch.dtype
) -> Tensor:
    if block[1] >= w.shape[1]:  # as kernels do: scales after the sum
        wide = torch.float64 if x.dtype == torch.int8 else torch.float32
        sums = (x.to(wide) @ w.to(wide).T).float()
        result = sums * w_scale.repeat_interleave(block[0], 0)[: w.shape[0], 0] * x_scale
    else:
        rows = x.float().unflatten(-1, (-1, block[1])) * x_scale.unsqueeze(-1)
        result = rows.flatten(-2) @ spread(w_scale, block, w.shape).mul_(w.float()).T
    return (result if bias is None else result + bias.float()).to(dtype)


torch.library.impl("llmbuild::linear_scaled", "CompositeExplicitAutograd")(linear_scaled)


def spread(scale: Tensor, block: list[int] | tuple[int, int], shape: torch.Size | tuple[int, int]) -> Tensor:
    """Return the scale of each weight, [N, K], from one a block."""
    rows, columns = shape
    down, across = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    wide = scale.reshape(down, across)[torch.arange(rows) // block[0]]
    return wide.repeat_interleave(block[1], 1)[:, :columns].contiguous()


@torch.library.register_fake("llmbuild::linear_scaled")
def _(x, w, x_scale, w_scale, bias, block, dtype):
    return x.new_empty(*x.shape[:-1], w.shape[0], dtype=dtype)
