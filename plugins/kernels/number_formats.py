"""bfloat16 and 8-bit floats as their bits, in numpy: exact to float32, and from float32 as NVIDIA GPUs round."""

from __future__ import annotations

from functools import cache

import numpy as np


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 -> float32, exact."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16, to nearest, ties to even; every NaN becomes 0x7FC0."""
    bits = np.array(x, dtype=np.float32, order="C").view(np.uint32)  # a copy: views need contiguous memory
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


@cache
def float8_values(mantissa_bits: int) -> np.ndarray:
    """float32 [256]: the value of each code. 3 bits of mantissa: e4m3fn (no infinity); 2: e5m2."""
    codes = np.arange(256)
    exponent_bits = 7 - mantissa_bits
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
    subnormal = mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
    values = np.where(exponent == 0, subnormal, normal)
    if mantissa_bits == 3:
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(codes < 128, values, -values).astype(np.float32)


def float8_to_float32(bits: np.ndarray, mantissa_bits: int = 3) -> np.ndarray:
    """uint8 -> float32, exact; see `float8_values`."""
    return float8_values(mantissa_bits)[np.asarray(bits)]


def float32_to_float8(x: np.ndarray, mantissa_bits: int = 3) -> np.ndarray:
    """float32 -> uint8, to nearest, ties to even. What is too large, infinity too, becomes the largest finite value."""
    positive = float8_values(mantissa_bits)[:128]
    finite = positive[np.isfinite(positive)].astype(np.float64)
    middles = (finite[1:] + finite[:-1]) / 2
    magnitude = np.abs(np.asarray(x, dtype=np.float64))
    below = np.searchsorted(middles, magnitude, side="left")  # at a tie: the smaller code
    above = np.searchsorted(middles, magnitude, side="right")
    codes = np.where(below % 2 == 0, below, above).astype(np.uint8)
    codes = np.where(np.isnan(magnitude), np.uint8(0x7F), codes)
    return codes | (np.signbit(x).astype(np.uint8) << np.uint8(7))
