"""Block-quantized weights in the layouts that the operators read. Values are moved, never rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx

from llmbuild.builder.ir import BlockPart, Program
from llmbuild.builder.weights import PIECE
from llmbuild.errors import UnsupportedError
from llmbuild.quantization.blocks import BlockTensor

Array = npt.NDArray[Any]
Parts = tuple[Array, Array, Array | None]  # q, scale and offset
ROWS = 8  # rows of a tile of native/block_weight.h

# Formats whose scales and offsets are float16 in the file; the others need float32.
HALF_SCALES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})


@dataclass(frozen=True)
class Blocks:
    """The operands of `linear_blockwise` or `embedding_blockwise`, not loaded yet.

    W[n, k] = scale[n, k // block_size] * (q[n, k] - zero) + offset[n, k // block_size], W is [rows, columns].

    load: returns q, scale and offset of all rows. stream: yields them piece by piece; None: all at once.
    """

    name: str
    rows: int
    columns: int
    bits: int
    block_size: int
    zero: int
    has_offset: bool
    source: str
    load: Callable[[], Parts]
    stream: Callable[[], Iterator[Parts]] | None = None

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block_size)

    def pieces(self) -> Iterator[Blocks]:
        """Yield the weight in pieces of rows. All but the last are whole tiles of ROWS rows."""
        if self.stream is None:
            yield self
            return
        for parts in whole_tiles(self.stream()):
            yield replace(self, rows=len(parts[0]), load=partial(cut, parts, slice(None)), stream=None)


def whole_tiles(pieces: Iterator[Parts]) -> Iterator[Parts]:
    """Regroup rows so that every piece but the last holds a multiple of ROWS of them."""
    rest: Parts | None = None
    for piece in pieces:
        if rest is not None:
            piece = below(rest, piece)
        left = len(piece[0]) % ROWS
        rest = cut(piece, slice(len(piece[0]) - left, None)) if left else None
        if len(piece[0]) > left:
            yield cut(piece, slice(len(piece[0]) - left))
    if rest is not None:
        yield rest


def below(first: Parts, second: Parts) -> Parts:
    """Return the rows of both."""
    q, scale, offset = (
        None if a is None or b is None else np.concatenate((a, b)) for a, b in zip(first, second, strict=True)
    )
    assert q is not None and scale is not None
    return q, scale, offset


def cut(parts: Parts, rows: slice) -> Parts:
    q, scale, offset = parts
    return q[rows], scale[rows], None if offset is None else offset[rows]


def blocks_of(
    program: Program, q: fx.Node, scale: fx.Node, offset: fx.Node | None, bits: int, block_size: int, zero: int
) -> Blocks:
    """Describe a block-quantized weight from the arguments of the op that reads it."""
    parts = [program.weights[node.name] for node in (q, scale, offset) if node is not None]
    sources = {id(part.source) for part in parts if isinstance(part, BlockPart)}
    rows, columns = parts[0].shape
    one_source = all(isinstance(part, BlockPart) for part in parts) and len(sources) == 1
    form = parts[0].source.block_format if one_source else None  # type: ignore[attr-defined]

    def load() -> Parts:
        if one_source:  # read the blocks once, not once a part
            return arrays(parts[0].source.load_blocks())  # type: ignore[attr-defined]
        loaded = [part.load().numpy() for part in parts]
        return loaded[0], loaded[1], None if offset is None else loaded[2]

    def stream() -> Iterator[Parts]:
        return (arrays(piece) for piece in parts[0].source.block_pieces(PIECE))  # type: ignore[attr-defined]

    return Blocks(
        name=q.name.removesuffix("_q"),
        rows=rows,
        columns=columns,
        bits=bits,
        block_size=block_size,
        zero=zero,
        has_offset=offset is not None,
        source=form.source if form is not None else f"int{bits}",
        load=load,
        stream=stream if one_source else None,
    )


def arrays(blocks: BlockTensor) -> Parts:
    return blocks.q.numpy(), blocks.scale.numpy(), None if blocks.offset is None else blocks.offset.numpy()


def dequantized(weight: Blocks) -> Array:
    """Return the float32 [rows, columns] weight."""
    q, scale, offset = weight.load()
    wide = np.repeat(scale, weight.block_size, axis=1)[:, : weight.columns]
    values = wide * (q.astype(np.float32) - np.float32(weight.zero))
    if offset is not None:
        values += np.repeat(offset, weight.block_size, axis=1)[:, : weight.columns]
    return values.astype(np.float32)


def padded(q: Array, rows: int, columns: int, fill: int) -> Array:
    """Return q [N, K] with `fill` added below and to the right, up to [rows, columns]."""
    return np.pad(q, ((0, rows - q.shape[0]), (0, columns - q.shape[1])), constant_values=fill)


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
