"""What travels through the build: the FX graph, its weights as lazy expressions, and the model's facts.

The IR is the FX graph itself (no second IR). Placeholders come in two groups, inputs first:

    input_ids [T] int32, position_ids [T] int32, logits_indices [L] int32, then one placeholder per weight.

Every node carries its fake tensor in `node.meta["val"]`. Weights are not loaded: `Program.weights[placeholder name]`
is a `WeightExpr` that reads, casts or merges one tensor when a target asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx

from llmbuild.errors import UnsupportedError

if TYPE_CHECKING:
    from llmbuild.quantization.blocks import BlockFormat, BlockTensor

INPUT_NAMES = ("input_ids", "position_ids", "logits_indices")


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
class Concat:
    """Several weights stacked along axis 0 (q/k/v, gate/up), never held twice.

    Block formats survive when all parts share one and each part covers whole rows, which axis 0 guarantees.
    """

    parts: tuple[WeightExpr, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def block_format(self) -> BlockFormat | None:
        formats = {part.block_format for part in self.parts}
        return formats.pop() if len(formats) == 1 else None

    def load(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        row = 0
        for part in self.parts:
            out[row : row + part.shape[0]] = part.load()
            row += part.shape[0]
        return out

    def load_blocks(self) -> BlockTensor:
        return _blocks_below_each_other(self.parts)

    def sources(self) -> frozenset[str]:
        return frozenset().union(*(part.sources() for part in self.parts))


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


@dataclass(frozen=True)
class Stack:
    """Weights of one shape along a new axis 0: the experts of a layer, loaded one after the other.

    Beside the stacked tensor only one part is ever in memory. If all parts are stored in blocks of one format, so is
    the stack; its blocks are those of the parts below each other, [E·N, K].
    """

    parts: tuple[WeightExpr, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def block_format(self) -> BlockFormat | None:
        formats = {part.block_format for part in self.parts}
        return formats.pop() if len(formats) == 1 else None

    def load(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        for place, part in enumerate(self.parts):
            out[place] = part.load()
        return out

    def load_blocks(self) -> BlockTensor:
        return _blocks_below_each_other(self.parts)

    def sources(self) -> frozenset[str]:
        return frozenset().union(*(part.sources() for part in self.parts))


def items(stack: WeightExpr) -> tuple[WeightExpr, ...]:
    """Return the matrices of a stacked weight, each loadable without the others where the checkpoint allows it."""
    return stack.parts if isinstance(stack, Stack) else tuple(Item(stack, index) for index in range(stack.shape[0]))


@dataclass(frozen=True)
class Map:
    """A plain tensor computed from another weight: `function` must be cheap, deterministic and described by `label`."""

    source: WeightExpr
    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: str

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


@dataclass(frozen=True)
class LayerKV:
    """KV cache geometry of one attention layer."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model that the engine and the runtime need; everything else is in the graph."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    source_kind: str  # "huggingface" or "gguf"
    source_files: tuple[tuple[str, int, str], ...]  # (name, bytes, sha256) of every file read


@dataclass
class Rewrite:
    """What one pass did: how often it fired, and why it declined where it might have been expected to fire."""

    name: str
    count: int
    declined: list[str] = field(default_factory=list)


@dataclass
class Program:
    """A traced model on its way to a target.

    Attributes:
        graph: FX graph over ATen and `llmbuild` ops.
        weights: Placeholder name -> expression, for every placeholder that is not an input.
        info: Model facts.
        kv_layers: KV geometry by layer index.
        tokenizer_files: File name -> bytes for the engine's `tokenizer/` folder.
        rewrites: Log of the passes, in order.
    """

    graph: fx.Graph
    weights: dict[str, WeightExpr]
    info: ModelInfo
    kv_layers: tuple[LayerKV, ...]
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    rewrites: list[Rewrite] = field(default_factory=list)

    def placeholder(self, name: str) -> fx.Node:
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name == name:
                return node
        raise KeyError(name)

    def weight_of(self, node: Any) -> WeightExpr | None:
        """Return the weight that a graph argument stands for, or None if it is not a weight placeholder."""
        if isinstance(node, fx.Node) and node.op == "placeholder":
            return self.weights.get(node.name)
        return None

    def add_weight(self, name: str, expr: WeightExpr, fake: Tensor) -> fx.Node:
        """Insert a weight placeholder after the existing placeholders and return it. `name` must be new."""
        if name in self.weights or name in INPUT_NAMES:
            raise ValueError(f"weight {name!r} exists")
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        if node.name != name:
            raise ValueError(f"weight name {name!r} is taken by a graph node")
        node.meta["val"] = fake
        self.weights[name] = expr
        return node

    def drop_unused_weights(self) -> int:
        """Erase weight placeholders without users (their data live on in merged ones). Returns how many."""
        dropped = 0
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and not node.users and node.name in self.weights:
                del self.weights[node.name]
                self.graph.erase_node(node)
                dropped += 1
        return dropped


def source_line(node: fx.Node) -> str:
    """Return the model's source line that a node came from ("modeling_llama.py:123 in forward"), or its name."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return node.name
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return node.name
    path, line, *rest = frames[-1].removeprefix("File ").split(", ")
    return f"{path.strip(chr(34)).rsplit('/', 1)[-1]}:{line.removeprefix('line ')} {' '.join(rest)}".strip()


def raise_unsupported(target: str, problems: Sequence[tuple[fx.Node, str]]) -> None:
    """Raise one error that names every node a target cannot lower, with reasons and source lines."""
    if not problems:
        return
    lines = [f"  {node.name} ({node.target}): {reason} [{source_line(node)}]" for node, reason in problems]
    raise UnsupportedError(
        f"target {target!r} cannot lower {len(problems)} node(s):\n" + "\n".join(lines),
        hint="choose another --target, or report the op names above",
    )
