"""Block-quantized weights in the layouts that the operators of the cpu target read. Values are moved, never rounded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmbuild.builder.targets.onnx_graph.blocks import Array, Blocks, padded
from llmbuild.errors import UnsupportedError

# Formats whose scales and offsets are float16 in the file; the others need float32.
HALF_SCALES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})


# ------------------------------------------------------------------------------------------- for MatMulNBits
@dataclass(frozen=True)
class NBits:
    """How a weight is given to MatMulNBits, whose values are scale·(B - 2**(bits - 1)).

    shift: what is added to q so that `zero` falls on that middle. Where it does not fit (4-bit unsigned formats), the
    difference goes into a float offset per block, `remainder`, that a small matrix product adds.
    """

    shift: int
    remainder: bool

    @classmethod
    def of(cls, weight: Blocks) -> NBits:
        middle = 1 << (weight.bits - 1)
        shift = middle - weight.zero
        if shift and weight.bits == 4:
            return cls(0, True)
        return cls(shift, weight.has_offset)


def nbits_values(weight: Blocks, q: Array) -> Array:
    """Return uint8 [N, blocks, block_size * bits / 8]; of two 4-bit values in a byte the first is in the low half."""
    form = NBits.of(weight)
    middle = 1 << (weight.bits - 1)
    shifted = padded(q.astype(np.int16) + form.shift, weight.rows, weight.blocks * weight.block_size, middle)
    if shifted.min() < 0 or shifted.max() >= 1 << weight.bits:
        raise AssertionError(f"{weight.name}: values {shifted.min()}..{shifted.max()} do not fit {weight.bits} bits")
    values: Array = shifted.astype(np.uint8)
    if weight.bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    return values.reshape(weight.rows, weight.blocks, -1)


def nbits_remainder(weight: Blocks, scale: Array, offset: Array | None) -> Array:
    """Return float32 [blocks, N]: what scale·(B - middle) lacks, to be multiplied by the sums of x over blocks."""
    missing = (1 << (weight.bits - 1)) - weight.zero - NBits.of(weight).shift
    rest = scale * np.float32(missing)
    return np.ascontiguousarray((rest if offset is None else rest + offset).T, dtype=np.float32)


# --------------------------------------------------------------------------------------------- for native/
def record_bytes(weight: Blocks) -> int:
    """Bytes of one record of native/block_weight.h: 8 rows of one block."""
    scales = 1 + weight.has_offset
    return scales * (16 if half_scales(weight) else 32) + native_block(weight) * weight.bits


def half_scales(weight: Blocks) -> bool:
    return weight.source in HALF_SCALES


def native_block(weight: Blocks) -> int:
    """Columns of a record: 16, or 32 for all other blocks, whose scale is then repeated."""
    return 16 if weight.block_size == 16 else 32


def native_records(weight: Blocks) -> Array:
    """Return uint8 [tiles, blocks, record_bytes], the layout that native/block_weight.h describes.

    Raises:
        UnsupportedError: q - zero does not fit the signed bytes that native/block_unpack.h computes.
    """
    q, scale, offset = weight.load()
    if weight.bits == 8 and weight.zero not in (0, 128):
        most = max(int(q.max()) - weight.zero, weight.zero - int(q.min()) - 1)
        if most > 127:
            raise UnsupportedError(f"{weight.name}: q - zero reaches {most}, which no signed byte holds")
    block = native_block(weight)
    blocks = -(-weight.columns // block)
    tiles = -(-weight.rows // 8)
    q = padded(q, tiles * 8, blocks * block, weight.zero)
    grouped = q.reshape(tiles, 8, blocks, block // 4, 4).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(tiles, blocks, block // 4, 32)
    if weight.bits == 4:
        grouped = grouped[:, :, : block // 8] | (grouped[:, :, block // 8 :] << 4)
    parts = [scale_bytes(weight, part, tiles, blocks) for part in (scale, offset) if part is not None]
    return np.concatenate([*parts, grouped.reshape(tiles, blocks, -1)], axis=-1)


def scale_bytes(weight: Blocks, scale: Array, tiles: int, blocks: int) -> Array:
    """Return uint8 [tiles, blocks, 16 or 32] of a float32 [N, ceil(K / block_size)] scale or offset."""
    scale = np.repeat(scale, -(-weight.block_size // native_block(weight)), axis=1)[:, :blocks]
    scale = padded(scale, tiles * 8, blocks, 0)
    if half_scales(weight):
        half = scale.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), scale):
            raise AssertionError(f"{weight.name}: scales of {weight.source} should be float16")
        scale = half
    by_tile = np.ascontiguousarray(scale.reshape(tiles, 8, blocks).transpose(0, 2, 1))
    return by_tile.view(np.uint8).reshape(tiles, blocks, -1)
