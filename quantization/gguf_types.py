"""GGUF's block types, unpacked exactly: raw bytes of a tensor → `BlockTensor`. Nothing is rounded.

Every type stores blocks of 32 or 256 columns. The formulas, with d, m, D, M half precision and q unsigned:

    Q4_0  d·(q - 8)      Q4_1  d·q + m      Q5_0  d·(q - 16)     Q5_1  d·q + m      Q8_0  d·q, q signed
    Q4_K, Q5_K  (D·s)·q - M·t  with 6-bit s, t per 32 columns     Q6_K  (D·s)·(q - 32)  with 8-bit s per 16 columns
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from llmbuild.errors import UnsupportedError, nearest
from llmbuild.quantization.blocks import BlockFormat, BlockTensor

# raw blocks [B, bytes] -> q uint8 [B, columns], scale float32 [B, groups], offset float32 [B, groups] or None
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def decode(type_name: str, raw: np.ndarray, shape: tuple[int, int]) -> BlockTensor:
    """Unpack a tensor of a GGUF block type.

    Args:
        type_name: Name of the type, such as "Q4_1".
        raw: uint8 [N, bytes of a row], as stored.
        shape: (N, K) of the weight; K is a multiple of the type's block.

    Raises:
        UnsupportedError: the type is not one of `BLOCK_TYPES`.
    """
    kind = block_type(type_name)
    rows, columns = shape
    if columns % kind.columns or raw.shape != (rows, columns // kind.columns * kind.bytes):
        raise ValueError(f"{type_name}: {raw.shape} bytes do not hold a {shape} weight")
    q, scale, offset = kind.unpack(np.ascontiguousarray(raw).reshape(-1, kind.bytes))
    return BlockTensor(
        format=kind.format(type_name),
        q=torch.from_numpy(np.ascontiguousarray(q.reshape(rows, columns))),
        scale=torch.from_numpy(np.ascontiguousarray(scale.reshape(rows, -1))),
        offset=None if offset is None else torch.from_numpy(np.ascontiguousarray(offset.reshape(rows, -1))),
    )


def block_type(type_name: str) -> BlockType:
    """Return the description of `type_name`. Raises UnsupportedError for an unknown one."""
    try:
        return BLOCK_TYPES[type_name]
    except KeyError:
        raise UnsupportedError(
            f"GGUF tensor type {type_name} is not supported", hint=nearest(type_name, list(BLOCK_TYPES))
        ) from None


@dataclass(frozen=True)
class BlockType:
    """One block of `columns` weights takes `bytes`; `group` columns share a scale."""

    columns: int
    bytes: int
    group: int
    bits: int
    zero: int
    has_offset: bool
    unpack: Callable[[np.ndarray], _Parts]

    def format(self, type_name: str) -> BlockFormat:
        return BlockFormat(self.bits, self.group, self.zero, self.has_offset, source=type_name)


def _half(raw: np.ndarray) -> np.ndarray:
    """Two bytes a value -> float32."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: np.ndarray, run: int) -> np.ndarray:
    """Bytes [B, n] -> [B, 2n]: of every `run` bytes first all low halves, then all high halves."""
    runs = raw.reshape(len(raw), -1, 1, run)
    return np.concatenate((runs & 0x0F, runs >> 4), axis=2).reshape(len(raw), -1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """Four bytes [B, 4] -> bit i as 0 or 16, [B, 32]."""
    return np.unpackbits(raw, axis=1, bitorder="little") << 4


def _q4_0(raw: np.ndarray) -> _Parts:
    return _nibbles(raw[:, 2:], 16), _half(raw[:, :2]), None


def _q4_1(raw: np.ndarray) -> _Parts:
    return _nibbles(raw[:, 4:], 16), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q5_0(raw: np.ndarray) -> _Parts:
    return _nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6]), _half(raw[:, :2]), None


def _q5_1(raw: np.ndarray) -> _Parts:
    return _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: np.ndarray) -> _Parts:
    return raw[:, 2:] ^ 0x80, _half(raw[:, :2]), None  # flipping the sign bit adds 128


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset of 8 groups from D, M and 12 bytes of 6-bit numbers, [B, 16] -> twice float32 [B, 8].

    The first four s and t are the low 6 bits of bytes 0-3 and 4-7. The last four have their low 4 bits in the halves
    of bytes 8-11 and their high 2 bits on top of bytes 0-3 and 4-7.
    """
    low_s, low_t, mixed = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    s = np.concatenate((low_s & 0x3F, (mixed & 0x0F) | (low_s >> 6 << 4)), axis=1)
    t = np.concatenate((low_t & 0x3F, (mixed >> 4) | (low_t >> 6 << 4)), axis=1)
    return _half(raw[:, :2]) * s.astype(np.float32), -(_half(raw[:, 2:4]) * t.astype(np.float32))


def _q4_k(raw: np.ndarray) -> _Parts:
    return (_nibbles(raw[:, 16:], 32), *_k_scales(raw))


def _q5_k(raw: np.ndarray) -> _Parts:
    # bit g of byte i of the 32 high bytes belongs to column 32·g + i
    high = (raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (_nibbles(raw[:, 48:], 32) | (high.reshape(len(raw), -1) << 4), *_k_scales(raw))


def _q6_k(raw: np.ndarray) -> _Parts:
    # two bits 2·g of byte i of each 32 high bytes belong to column 32·g + i of that half
    low = _nibbles(raw[:, :128], 64)
    high = raw[:, 128:192].reshape(len(raw), 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    return low | (high.reshape(len(raw), -1) << 4), _half(raw[:, 208:]) * scales, None


BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, 32, bits=4, zero=8, has_offset=False, unpack=_q4_0),
    "Q4_1": BlockType(32, 20, 32, bits=4, zero=0, has_offset=True, unpack=_q4_1),
    "Q5_0": BlockType(32, 22, 32, bits=5, zero=16, has_offset=False, unpack=_q5_0),
    "Q5_1": BlockType(32, 24, 32, bits=5, zero=0, has_offset=True, unpack=_q5_1),
    "Q8_0": BlockType(32, 34, 32, bits=8, zero=128, has_offset=False, unpack=_q8_0),
    "Q4_K": BlockType(256, 144, 32, bits=4, zero=0, has_offset=True, unpack=_q4_k),
    "Q5_K": BlockType(256, 176, 32, bits=5, zero=0, has_offset=True, unpack=_q5_k),
    "Q6_K": BlockType(256, 210, 16, bits=6, zero=32, has_offset=False, unpack=_q6_k),
}
