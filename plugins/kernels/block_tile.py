"""Tiles of block-quantized weights (see `block_layout`) to numbers, without a conversion of integers.

A value q of b bits goes into the upper bits of a float's mantissa: that is 1 + q / 2**b, exactly. So W = scale * (q -
zero) + offset is one multiplication and addition, float * (2**b * scale) + (offset - scale * (2**b + zero)).
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE = tl.constexpr(0x3F800000)  # the float32 1.0


@triton.jit
def low_half(units, BITS: tl.constexpr):
    """uint8 -> float32 1 + q / 2**BITS, of the values in the low half, or of all that there are with 8 bits."""
    if BITS == 8:
        bits = units.to(tl.uint32) << 15
    else:
        bits = (units & 15).to(tl.uint32) << 19
    return (bits | ONE).to(tl.float32, bitcast=True)


@triton.jit
def high_half(units):
    """The same of the values in the high half of a byte."""
    bits = (units >> 4).to(tl.uint32) << 19
    return (bits | ONE).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(scales, rows, k, mask, K: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """float32 [rows, columns]: scale or offset of columns k (int [1, columns]); rows int [rows, 1]."""
    BLOCKS: tl.constexpr = (K + BLOCK_SIZE - 1) // BLOCK_SIZE
    return tl.load(scales + rows * BLOCKS + k // BLOCK_SIZE, mask=mask, other=0.0).to(tl.float32)
