"""Weights as lazy expressions: shape and dtype are known, data are read, cast, merged or made when they are asked for.

A target asks for pieces, rows by rows, so that the weights of a large model never lie in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llmbuild.quantization.blocks import BlockFormat, BlockTensor


PIECE = 1 << 22  # elements of a piece: large enough for full speed, small beside everything else a build holds


class WeightExpr(Protocol):
    """A weight that can be computed on demand. Shape and dtype are known without reading data."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def block_format(self) -> BlockFormat | None:
        """The block-quantized form this weight is stored in, or None when it is a plain tensor."""
        ...

    def load(self) -> Tensor:
        """Return the plain tensor, contiguous, of `shape` and `dtype` (dequantized if stored in blocks)."""
        ...

    def load_blocks(self) -> BlockTensor:
        """Return the stored blocks unchanged. Only when `block_format` is not None."""
        ...

    def sources(self) -> frozenset[str]:
        """Names of the checkpoint tensors this reads."""
        ...

    def pieces(self, elements: int) -> Iterator[Tensor]:
        """Yield the plain tensor in pieces of whole rows, which one after the other are the bytes of `load()`.

        A piece holds at most `elements` elements, or one row if that is more. It is read when it is asked for.
        """
        ...

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        """Yield the rows of `load_blocks()` in pieces likewise. Only when `block_format` is not None."""
        ...

    def held(self, elements: int) -> int:
        """Return how many bytes are in memory at most while a piece is made, mapped pages of the file included."""
        ...


def rows_at_once(shape: Sequence[int], elements: int) -> int:
    """Return how many rows (along axis 0) a piece of at most `elements` elements has; at least one."""
    return max(1, elements // max(1, math.prod(shape[1:])))


def row_pieces(tensor: Tensor, elements: int) -> Iterator[Tensor]:
    """Yield a tensor that is in memory in pieces."""
    return iter(tensor.split(rows_at_once(tensor.shape, elements)) if tensor.ndim else [tensor])


def piece_size(shape: Sequence[int], elements: int) -> int:
    """Return the number of elements of the largest piece."""
    return min(math.prod(shape), rows_at_once(shape, elements) * math.prod(shape[1:]))


@dataclass(frozen=True)
class Constant:
    """A tensor that no checkpoint holds: a recomputed buffer such as `inv_freq`, or a literal of the graph."""

    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        return self.value.contiguous()

    def load_blocks(self) -> BlockTensor:
        raise TypeError("a constant is not stored in blocks")

    def sources(self) -> frozenset[str]:
        return frozenset()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return row_pieces(self.load(), elements)

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        return 0 if self.value.is_contiguous() else self.value.nbytes


@dataclass(frozen=True)
class Cast:
    """A weight in another dtype. Stored blocks stay reachable: only their dequantized form is cast."""

    source: WeightExpr
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def block_format(self) -> BlockFormat | None:
        return self.source.block_format

    def load(self) -> Tensor:
        return self.source.load().to(self.dtype)

    def load_blocks(self) -> BlockTensor:
        return self.source.load_blocks()

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (piece.to(self.dtype) for piece in self.source.pieces(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        return self.source.block_pieces(elements)

    def held(self, elements: int) -> int:
        return self.source.held(elements) + piece_size(self.shape, elements) * self.dtype.itemsize


def _blocks_below_each_other(parts: Sequence[WeightExpr]) -> BlockTensor:
    """Return the rows of all parts, which share one format, as one [sum of N, K]; one part is in memory beside it."""
    from llmbuild.quantization.blocks import BlockTensor

    first = parts[0].load_blocks()
    rows = sum(part.shape[0] for part in parts)
    whole = [None if t is None else t.new_empty(rows, t.shape[1]) for t in (first.q, first.scale, first.offset)]
    row = 0
    for place, part in enumerate(parts):
        blocks = first if place == 0 else part.load_blocks()
        for target, piece in zip(whole, (blocks.q, blocks.scale, blocks.offset), strict=True):
            if target is not None and piece is not None:
                target[row : row + part.shape[0]] = piece
        row += part.shape[0]
    q, scale, offset = whole
    assert q is not None and scale is not None
    return BlockTensor(first.format, q, scale, offset)


@dataclass(frozen=True)
class _Joined:
    """Weights of which one after the other is read; all blocks survive when the parts share one format."""

    parts: tuple[WeightExpr, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def block_format(self) -> BlockFormat | None:
        formats = {part.block_format for part in self.parts}
        return formats.pop() if len(formats) == 1 else None

    def load_blocks(self) -> BlockTensor:
        return _blocks_below_each_other(self.parts)

    def sources(self) -> frozenset[str]:
        return frozenset().union(*(part.sources() for part in self.parts))

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (piece for part in self.parts for piece in part.pieces(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        return (piece for part in self.parts for piece in part.block_pieces(elements))

    def held(self, elements: int) -> int:
        return max(part.held(elements) for part in self.parts)


@dataclass(frozen=True)
class Concat(_Joined):
    """Several weights stacked along axis 0 (q/k/v, gate/up), never held twice.

    Block formats survive when all parts share one and each part covers whole rows, which axis 0 guarantees.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:])

    def load(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        row = 0
        for part in self.parts:
            out[row : row + part.shape[0]] = part.load()
            row += part.shape[0]
        return out


@dataclass(frozen=True)
class Item:
    """One matrix of a stack: `source[index]`. Reads no more of a memory-mapped tensor than that."""

    source: WeightExpr
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        return self.source.load()[self.index].contiguous()

    def load_blocks(self) -> BlockTensor:
        raise TypeError("an item of a stack is a plain tensor")

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return row_pieces(self.load(), elements)

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stack(_Joined):
    """Weights of one shape along a new axis 0: the experts of a layer, loaded one after the other.

    Beside the stacked tensor only one part is ever in memory. If all parts are stored in blocks of one format, so is
    the stack; its blocks are those of the parts below each other, [E·N, K].
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def load(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        for place, part in enumerate(self.parts):
            out[place] = part.load()
        return out


def items(stack: WeightExpr) -> tuple[WeightExpr, ...]:
    """Return the matrices of a stacked weight, each loadable without the others where the checkpoint allows it."""
    if isinstance(stack, Stack):
        return stack.parts
    if isinstance(stack, Cast):  # cast one matrix, not the stack
        return tuple(Cast(item, stack.dtype) for item in items(stack.source))
    return tuple(Item(stack, index) for index in range(stack.shape[0]))


@dataclass(frozen=True)
class Map:
    """A plain tensor computed from another weight: `function` must be cheap, deterministic and described by `label`.

    rowwise: whether the function, given some rows alone, returns the same rows of its result. It is else given all.
    """

    source: WeightExpr
    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: str
    rowwise: bool = False

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        out = self.function(self.source.load()).contiguous()
        if tuple(out.shape) != self.shape or out.dtype != self.dtype:
            raise AssertionError(f"{self.label}: got {tuple(out.shape)} {out.dtype}, said {self.shape} {self.dtype}")
        return out

    def load_blocks(self) -> BlockTensor:
        raise TypeError(f"{self.label}: a mapped weight is not stored in blocks")

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        if not self.rowwise:
            return row_pieces(self.load(), elements)
        return (self.function(piece).contiguous() for piece in self.source.pieces(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        if not self.rowwise:
            elements = math.prod(self.source.shape)
        # Twice: a function may make its result in two steps.
        return self.source.held(elements) + 2 * piece_size(self.shape, elements) * self.dtype.itemsize


class LastBlocks:
    """Remembers the blocks loaded last, so that q, scale and offset of a weight are made once, one weight at a time."""

    def __init__(self) -> None:
        self._held: tuple[WeightExpr, BlockTensor] | None = None

    def load(self, source: WeightExpr) -> BlockTensor:
        if self._held is None or self._held[0] is not source:
            self._held = None  # free the other weight's blocks before these are made
            self._held = (source, source.load_blocks())
        return self._held[1]

    def forget(self) -> None:
        """Free the blocks. Call once all weights are written."""
        self._held = None


LAST_BLOCKS = LastBlocks()


@dataclass(frozen=True)
class BlockPart:
    """One component ("q", "scale" or "offset") of a weight stored in blocks: the operands of `linear_blockwise`.

    The parts of one weight share `source`; loading them one after the other computes its blocks once.
    """

    source: WeightExpr
    part: str

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, columns = self.source.shape
        rows = math.prod(leading)
        if self.part == "q":
            return (rows, columns)
        assert self.source.block_format is not None
        return (rows, -(-columns // self.source.block_format.block_size))

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.part == "q" else torch.float32

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        tensor = getattr(LAST_BLOCKS.load(self.source), self.part)
        assert isinstance(tensor, Tensor)
        return tensor.contiguous()

    def load_blocks(self) -> BlockTensor:
        raise TypeError("a part of a block tensor is a plain tensor")

    def sources(self) -> frozenset[str]:
        return self.source.sources()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return (getattr(blocks, self.part).contiguous() for blocks in self.source.block_pieces(elements))

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        return self.source.held(elements)
