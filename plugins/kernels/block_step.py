"""A step of a product over K with block-quantized weights: units are loaded, become x's dtype and are multiplied."""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.block_tile import high_half, load_scales, low_half


@triton.jit
def columns_of(BITS: tl.constexpr, UNITS: tl.constexpr):
    """int [UNITS * 16]: column of the value in the low half of each byte, from the first unit on."""
    byte = tl.arange(0, UNITS * 16)
    return byte // 16 * (128 // BITS) + byte % 16


@triton.jit
def add_step(
    acc,
    x_low,
    x_high,
    w,
    w_scale,
    w_offset,
    row,
    start,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
):
    """acc + x · wᵀ over units start .. start + UNITS - 1 of some rows, int [BLOCK_N], of the weight.

    acc float32 [rows of x, BLOCK_N], or its transpose with SWAP. x_low, x_high: columns of x that belong to the values
    in low and high halves; x_high is not read with 8 bits.
    """
    VALUES: tl.constexpr = 128 // BITS
    ROW_UNITS: tl.constexpr = (K + VALUES - 1) // VALUES
    byte = start * 16 + tl.arange(0, UNITS * 16)
    addresses = w + row[:, None] * (ROW_UNITS * 16) + byte[None, :]
    if ROW_UNITS % UNITS == 0:
        units = tl.load(addresses)
    else:
        units = tl.load(addresses, mask=(byte < ROW_UNITS * 16)[None, :], other=0)
    k = (start + tl.arange(0, UNITS)) * VALUES
    factor, rest = affine(w_scale, w_offset, row, k, K, BITS, BLOCK_SIZE, ZERO, UNITS, BLOCK_N)
    acc = multiply(x_low, low_half(units, BITS) * factor + rest, acc, SWAP)
    if BITS == 4:
        if BLOCK_SIZE % VALUES != 0 and BLOCK_SIZE < K:  # the halves of a unit belong to different blocks
            factor, rest = affine(w_scale, w_offset, row, k + 16, K, BITS, BLOCK_SIZE, ZERO, UNITS, BLOCK_N)
        acc = multiply(x_high, high_half(units) * factor + rest, acc, SWAP)
    return acc


@triton.jit
def load_x(x_rows, k, live, K: tl.constexpr, STEP: tl.constexpr):
    if K % STEP == 0:
        tile = tl.load(x_rows + k[None, :], mask=live, other=0.0)
    else:
        tile = tl.load(x_rows + k[None, :], mask=live & (k < K)[None, :], other=0.0)
    return tile


@triton.jit
def affine(
    w_scale,
    w_offset,
    row,
    k,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Factor and rest that make weights of what `low_half` gives, float32 [BLOCK_N, UNITS * 16], or [BLOCK_N, 1] where
    all units of a step are in one block. k int [UNITS]: first column of each unit."""
    if BLOCK_SIZE >= K or BLOCK_SIZE % (UNITS * (128 // BITS)) == 0:
        k = tl.min(k, 0) + tl.arange(0, 1)
    mask = (k < K)[None, :]
    scale = load_scales(w_scale, row[:, None], k[None, :], mask, K, BLOCK_SIZE)
    factor = (1 << BITS) * scale
    rest = -((1 << BITS) + ZERO) * scale
    if w_offset is not None:
        rest += load_scales(w_offset, row[:, None], k[None, :], mask, K, BLOCK_SIZE)
    if BLOCK_SIZE < K and BLOCK_SIZE % (UNITS * (128 // BITS)) != 0:
        factor = repeat(factor, UNITS, BLOCK_N)
        rest = repeat(rest, UNITS, BLOCK_N)
    return factor, rest


@triton.jit
def repeat(values, UNITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N, UNITS] -> [BLOCK_N, UNITS * 16], each 16 times."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [BLOCK_N, UNITS, 16]), [BLOCK_N, UNITS * 16])


@triton.jit
def multiply(x_tile, weights, acc, SWAP: tl.constexpr):
    w_tile = weights.to(x_tile.dtype)
    if SWAP:
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
    else:
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
    return acc
