"""Order of the parts: what is a barrier, how many barriers lie before each value, and what must be in memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program
from llmbuild.builder.passes.edit import Size, arguments, is_tensor, rank, size
from llmbuild.builder.targets.cuda.buffers import Buffer, View
from llmbuild.builder.targets.cuda.index import Index, Var, index_of
from llmbuild.builder.targets.cuda.views import NoRule, step

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild

CACHE_SCALES = (9, 10)  # of paged_attention: computed for each token, or weights, or absent
# Op → (what it is, positions of the arguments that are computed; all other tensors must be weights).
BARRIERS: dict[Any, tuple[str, tuple[int, ...]]] = {
    aten.linear.default: ("gemm", (0,)),
    aten.addmm.default: ("gemm", (1,)),
    aten.mm.default: ("gemm", (0,)),
    aten.matmul.default: ("gemm", (0,)),
    aten.bmm.default: ("batched_gemm", (0,)),
    llmbuild.linear_blockwise.default: ("block_gemm", (0,)),
    llmbuild.linear_scaled.default: ("scaled_gemm", (0, 2)),
    llmbuild.linear_numbers.default: ("number_gemm", (0,)),
    llmbuild.paged_attention.default: ("attention", (0, 1, 2, *CACHE_SCALES)),
    llmbuild.moe_experts.default: ("experts", (0, 1, 2)),
    llmbuild.moe_experts_blockwise.default: ("block_experts", (0, 1, 2)),
    llmbuild.embedding_blockwise.default: ("block_embedding", (0,)),
}


def barrier(program: Program, node: fx.Node) -> str | None:
    """Return what kind of barrier a node is, None when it is computed row by row."""
    found = BARRIERS.get(node.target) if node.op == "call_function" else None
    if found is None:
        return None
    kind, computed = found
    operands = [arg for place, arg in enumerate(node.args) if isinstance(arg, fx.Node) and place not in computed]
    if kind in ("gemm", "batched_gemm") and any(program.weight_of(arg) is None for arg in operands):
        return None  # a product of two values: small, or refused by its rule
    return kind


def computed_operands(node: fx.Node) -> list[fx.Node]:
    """Return what a barrier reads besides weights."""
    kind, places = BARRIERS[node.target]
    if kind == "attention":
        optional = (arguments(node)[place] for place in CACHE_SCALES)
        computed = [scale for scale in optional if scale is not None and scale.op != "placeholder"]
        return [*node.args[:3], *computed]
    return [node.args[place] for place in places]  # type: ignore[misc]


def levels(program: Program) -> dict[fx.Node, int]:
    """Return for each node how many barriers lie on the longest way to it, itself included."""
    found: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        before = max((found[each] for each in node.all_input_nodes), default=0)
        found[node] = before + (barrier(program, node) is not None)
    return found


class Rows:
    """Which symbol counts the tokens (T) and which the rows of logits (L)."""

    def __init__(self, program: Program) -> None:
        self.of_symbol: dict[Any, str] = {}
        for name, rows in (("input_ids", "T"), ("position_ids", "T"), ("logits_indices", "L")):
            symbol = size(program.placeholder(name))[0]
            self.of_symbol.setdefault(symbol, rows)

    def buffer(self, node: fx.Node) -> Buffer:
        """Return the place in memory of a node's value.

        Raises:
            NoRule: It has two symbolic axes, or one that is neither.
        """
        dims = size(node)
        symbolic = [place for place, dim in enumerate(dims) if not isinstance(dim, int)]
        if not symbolic:
            return Buffer(node.name, node.meta["val"].dtype, dims)
        dim: Any = dims[symbolic[0]]
        for symbol, rows in self.of_symbol.items():
            each = dim / symbol
            if len(symbolic) == 1 and each.is_Integer:
                return Buffer(node.name, node.meta["val"].dtype, dims, rows, symbolic[0], int(each))
        raise NoRule(node, f"a value of shape {list(dims)}")


def strided(node: fx.Node, buffer: Buffer) -> View | None:
    """Return `node`, a chain of views of what `buffer` holds, as strides; None when its elements lie otherwise."""
    names = [f"i{place}" for place in range(rank(node))]
    dims = size(node)
    index = tuple(
        index_of(Var(name, dim if isinstance(dim, int) else None)) for name, dim in zip(names, dims, strict=True)
    )
    while (found := step(node, index)) is not None:
        node, index = found
    address: Index = buffer.address(index)
    strides = dict.fromkeys(names, 0)
    for atom, coefficient in address.terms:
        if atom.name not in strides:
            return None
        strides[atom.name] = coefficient
    return View(buffer.name, address.const, dims, tuple(strides.values()))


def is_dense(view: View, kept: int) -> bool:
    """Whether the last `kept` axes lie densely and all before them collapse into one axis of rows."""
    expected = 1
    dims, strides = list(view.shape), list(view.strides)
    for _ in range(min(kept, len(dims))):
        dim, stride = dims.pop(), strides.pop()
        if dim != 1 and stride != expected:
            return False
        expected *= int(dim)
    step_ = None
    for dim, stride in zip(reversed(dims), reversed(strides), strict=True):
        if dim == 1:
            continue
        if step_ is not None and stride != step_:
            return False
        step_ = stride * int(dim) if isinstance(dim, int) else -1
    return True


def dense_strides(shape: Size) -> tuple[int, ...]:
    """Return the strides of a tensor whose rows, along the first axis, lie below each other."""
    return tuple(math.prod(int(dim) for dim in shape[place + 1 :]) for place in range(len(shape)))


def reads_in_place(kind: str, view: View) -> bool:
    """Whether a barrier of a kind can read a view as it lies.

    Attention, experts and products of 8-bit numbers read rows below each other without a gap; a product with a stack of
    matrices, in any stride.
    """
    if kind in ("attention", "experts", "block_experts", "scaled_gemm", "number_gemm"):
        return view.offset == 0 and view.strides == dense_strides(view.shape)
    if kind == "batched_gemm":
        return view.shape[-1] == 1 or view.strides[-1] == 1
    return is_dense(view, 1)


def tensors(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if is_tensor(each)]
