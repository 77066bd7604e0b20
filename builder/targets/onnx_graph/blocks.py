"""Block-quantized weights as the graph holds them, read piece by piece. Values are moved, never rounded."""

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
from llmbuild.quantization.blocks import BlockTensor

Array = npt.NDArray[Any]
Parts = tuple[Array, Array, Array | None]  # q, scale and offset
ROWS = 8  # pieces hold a multiple of them: cpu/native/block_weight.h has tiles of 8 rows


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
