"""e4m3 floats as bytes, by integer arithmetic: SM 80 and 86 have no such type. The same bytes as the instructions'."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
SMALLEST_NORMAL = tl.constexpr(0.015625)  # 2**-6
# One unit in the last place of this float32 is 2**-9, the step between subnormals: adding it rounds to that step.
SUBNORMAL_ROUNDER = tl.constexpr(16384.0)


@triton.jit
def float32_to_e4m3(x):
    """float32 -> uint8, to nearest, ties to even; what is larger than 448 becomes 448; NaN stays NaN (0x7F, 0xFF)."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    m = magnitude.to(tl.uint32, bitcast=True)
    # 23 bits of mantissa become 3: add just under a half, one more if the last bit that stays is odd. Bias 127 to 7.
    normal = ((m + 0x7FFFF + ((m >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + SUBNORMAL_ROUNDER).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    return (tl.where(x != x, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def e4m3_to_float32(code):
    """uint8 -> float32, exact."""
    c = code.to(tl.uint32)
    magnitude = ((c & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120: bias 7 to 127
    magnitude = tl.where((c & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where(c >= 0x80, -magnitude, magnitude)
