"""Block-quantized weights as the kernels read them: rows of 16-byte units. Imports neither Triton nor torch.

    W[n, k] = scale[n, k // block_size] * (q[n, k] - zero) + offset[n, k // block_size]

A unit is what a thread loads at once: 16 values of 8 bits, or 32 of 4 bits. Of these, byte j holds value j in its low
half and value 16 + j in its high half, so that either half of a unit is a run of 16 columns:

    8 bits   byte  0 1 ... 15 | 16 ...         4 bits   byte   0  1 ... 15 | 16 ...
             value 0 1 ... 15 | 16 ...                  low    0  1 ... 15 | 32 ...
                                                        high  16 17 ... 31 | 48 ...
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmbuild.plugins.kernels.gemm_shape import FLOATS
from llmbuild.plugins.kernels.spec import POINTER_TYPES, Constant

UNIT_BYTES = 16
BITS = (8, 4)


@dataclass(frozen=True)
class BlockShape:
    """How a weight is held. bits: 8 or 4. block_size: a multiple of 16 columns, or at least K: one for each row.

    zero: 0 .. 2**bits - 1. has_offset: whether there is `offset`. scale_dtype: of scale and offset.

    Raises:
        ValueError: There are no kernels for such blocks.
    """

    bits: int
    block_size: int
    zero: int
    has_offset: bool = False
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"{self.bits} bits; kernels read {' or '.join(map(str, BITS))}")
        if self.block_size < 1 or not 0 <= self.zero < 2**self.bits:
            raise ValueError(f"blocks of {self.block_size} columns with {self.zero} as zero")
        if self.scale_dtype not in FLOATS:
            raise ValueError(f"scales of {self.scale_dtype!r}, which is none of {', '.join(FLOATS)}")

    @property
    def values(self) -> int:
        """Columns of a unit."""
        return UNIT_BYTES * 8 // self.bits

    def units(self, k: int) -> int:
        """Units of a row of k columns."""
        return -(-k // self.values)

    def types(self) -> dict[str, str]:
        """Triton types of the weight's arguments, absent ones left out."""
        scale = POINTER_TYPES[self.scale_dtype]
        return {"w": "*u8", "w_scale": scale} | ({"w_offset": scale} if self.has_offset else {})

    def constants(self, k: int) -> dict[str, Constant]:
        """Constants of the kernels for rows of k columns.

        Raises:
            ValueError: Blocks end inside of a run of 16 columns.
        """
        if self.block_size % UNIT_BYTES and self.block_size < k:
            raise ValueError(f"blocks of {self.block_size} columns; kernels read multiples of {UNIT_BYTES}")
        return {"BITS": self.bits, "BLOCK_SIZE": min(self.block_size, k), "ZERO": self.zero}


def pack_int4(q: np.ndarray) -> np.ndarray:
    """Return uint8 [N, 16 * ceil(K / 32)] of values 0 .. 15, uint8 [N, K]. Columns after the last hold 0."""
    rows, columns = q.shape
    units = -(-columns // 32)
    padded = np.zeros((rows, units * 32), dtype=np.uint8)
    padded[:, :columns] = q
    halves = padded.reshape(rows, units, 2, UNIT_BYTES)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1)


def pack_int8(q: np.ndarray) -> np.ndarray:
    """Return uint8 [N, 16 * ceil(K / 16)] of values 0 .. 255, uint8 [N, K]. Columns after the last hold 0."""
    return np.pad(q, ((0, 0), (0, -q.shape[1] % UNIT_BYTES)))


def pack_blocks(q: np.ndarray, bits: int) -> np.ndarray:
    """Return the units of values of 8 or 4 bits, uint8 [N, K]."""
    return pack_int4(q) if bits == 4 else pack_int8(q)
