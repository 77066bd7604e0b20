"""What travels through the build: the FX graph, its weights as lazy expressions, and the model's facts.

The IR is the FX graph itself (no second IR). Placeholders come in two groups, inputs first:

    input_ids [T] int32, position_ids [T] int32, logits_indices [L] int32, then one placeholder per weight.

Every node carries its fake tensor in `node.meta["val"]`. Weights are not loaded: `Program.weights[placeholder name]`
is a `WeightExpr` that reads, casts or merges one tensor when a target asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from llmbuild.builder.weights import (
    LAST_BLOCKS,
    BlockPart,
    Cast,
    Concat,
    Constant,
    Item,
    Map,
    Stack,
    WeightExpr,
    items,
)
from llmbuild.errors import UnsupportedError

__all__ = [
    "INPUT_NAMES",
    "LAST_BLOCKS",
    "BlockPart",
    "Cast",
    "Concat",
    "Constant",
    "Item",
    "LayerKV",
    "Map",
    "ModelInfo",
    "Program",
    "Rewrite",
    "Stack",
    "WeightExpr",
    "items",
    "raise_unsupported",
    "source_line",
]

INPUT_NAMES = ("input_ids", "position_ids", "logits_indices")


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
    quantized: str | None = None  # name of the format of a quantized Hugging Face checkpoint
    scattered: tuple[str, ...] = ()  # weights of such a checkpoint with groups of columns that are not neighbours


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
        cache_scales: By layer, those of the keys and of the values of an fp8 cache, float32 [1]: the checkpoint's, or
            calibrated; empty where there are none.
    """

    graph: fx.Graph
    weights: dict[str, WeightExpr]
    info: ModelInfo
    kv_layers: tuple[LayerKV, ...]
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    rewrites: list[Rewrite] = field(default_factory=list)
    cache_scales: tuple[tuple[WeightExpr, WeightExpr], ...] = ()

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
