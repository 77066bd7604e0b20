"""Random numbers as the bytes of a dtype, for benchmarks whose weights mean nothing. Numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PERIOD = 1 << 20  # numbers that are drawn; a longer block repeats them


def noise(dtype: str, num_bytes: int, generator: np.random.Generator, scale: float) -> npt.NDArray[np.uint8]:
    """Return about `num_bytes` bytes, whole numbers of `dtype`, normally distributed with deviation `scale`.

    float8 takes values below 2; integers and booleans are 0, so that indices stay in range.
    """
    count = min(PERIOD, max(1, num_bytes // 8))
    values = generator.normal(0, scale, count).astype(np.float32)
    match dtype:
        case "float32":
            block = values.view(np.uint8)
        case "float16":
            block = values.astype(np.float16).view(np.uint8)
        case "bfloat16":
            block = to_bfloat16(values).view(np.uint8)
        case "float8_e4m3fn" | "float8_e5m2":
            # All bits at random but the highest of the exponent: small numbers, no infinity or NaN among them.
            block = generator.integers(0, 256, count, np.uint8) & np.uint8(0xBF)
        case _:
            block = np.zeros(8 * count, np.uint8)
    return np.tile(block, max(1, num_bytes // len(block)))


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return finite numbers as bfloat16 bits, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
