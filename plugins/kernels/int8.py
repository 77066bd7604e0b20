"""Rounding to int8 with the additions of float32 alone: neither Triton's language nor its interpreter has `rint`."""

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2**23: one unit in the last place of this float32 is 1, for what is added and is small too.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def float32_to_int8(x):
    """float32 -> int8, to nearest, ties to even; what is beyond -127 or 127 becomes that."""
    inside = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return ((inside + ROUNDER) - ROUNDER).to(tl.int8)
