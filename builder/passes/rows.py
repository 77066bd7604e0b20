"""Which operands an op reads row by row: the facts behind moving a batch axis or a row gather through it.

An op is row-wise over axis 0 when row i of its result depends on row i of its *carriers* only, its other operands being
shared by all rows. Then `f(unsqueeze(x, 0)) = unsqueeze(f(x), 0)` and `gather(f(x), rows) = f(gather(x, rows))`.
Ops that are not in the table are never assumed to be row-wise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arg, arguments, axis, is_tensor, plain_size, rank, size, tensor_operands
from llmbuild.plugins import round_rows  # noqa: F401  (registers the op, which the table names)

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild

Rule = Callable[[fx.Node], "list[fx.Node] | None"]


def row_carriers(node: fx.Node) -> list[fx.Node] | None:
    """Return the operands that carry axis 0 of `node`'s result, or None when `node` is not row-wise over it."""
    if node.op != "call_function":
        return None
    rule = RULES.get(node.target)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = broadcast
    return None if rule is None else rule(node)


def result_size(node: fx.Node) -> tuple[Any, ...]:
    """Return the shape of a node's result; of its first one when it has several."""
    value = node.meta["val"]
    return plain_size(value.shape if isinstance(value, torch.Tensor) else value[0].shape)


def broadcast(node: fx.Node) -> list[fx.Node] | None:
    """Elementwise: operands of full rank carry axis 0, unless they are broadcast along it."""
    out = size(node)
    carriers = [arg for arg in tensor_operands(node) if rank(arg) == len(out) and size(arg)[0] == out[0]]
    return carriers or None


def first(node: fx.Node) -> list[fx.Node] | None:
    source = arg(node, 0)
    return [source] if isinstance(source, fx.Node) and (not is_tensor(source) or rank(source) > 1) else None


def normalised(node: fx.Node) -> list[fx.Node] | None:
    source, shape = arguments(node)[:2]
    return [source] if rank(source) > len(shape) else None


def two(node: fx.Node) -> list[fx.Node] | None:
    a, b = arguments(node)[:2]
    return [a, b] if size(a) == size(b) and rank(a) > 1 else None


def rotated(node: fx.Node) -> list[fx.Node] | None:
    x, cos, sin = arguments(node)[:3]
    if rank(x) < 3:
        return None
    tables = [t for t in (cos, sin) if rank(t) == rank(x) - 1 and size(t)[0] == size(x)[0]]
    return [x, *tables]


def spares_axis_0(position: int) -> Rule:
    """Ops on one tensor whose argument at `position` lists the axes they mix or move: row-wise when 0 is not in it."""

    def rule(node: fx.Node) -> list[fx.Node] | None:
        source: Any = arg(node, 0)
        dims = arguments(node)[position]
        of_rank = rank(node) if node.target is aten.unsqueeze.default else rank(source)
        dims = dims if isinstance(dims, Iterable) else [dims]
        return None if rank(source) < 2 or any(d is None or axis(d, of_rank) == 0 for d in dims) else [source]

    return rule


def swapped(node: fx.Node) -> list[fx.Node] | None:
    source: Any = arg(node, 0)
    return None if 0 in {axis(dim, rank(source)) for dim in arguments(node)[1:3]} else [source]


def permuted(node: fx.Node) -> list[fx.Node] | None:
    source, dims = arguments(node)
    return [source] if axis(dims[0], rank(source)) == 0 else None


def joined(node: fx.Node) -> list[fx.Node] | None:
    tensors, dim = arguments(node)[:2]
    same_rows = all(rank(t) > 1 and size(t)[0] == size(node)[0] for t in tensors)
    return list(tensors) if same_rows and axis(dim, rank(node)) != 0 else None


def same_first_size(node: fx.Node) -> list[fx.Node] | None:
    source: Any = arg(node, 0)
    kept = rank(source) > 1 and rank(node) > 1 and size(source)[0] == size(node)[0]
    return [source] if kept and (node.target is not aten.expand.default or rank(source) == rank(node)) else None


def batched(node: fx.Node) -> list[fx.Node] | None:
    a, b = arguments(node)[:2]
    if node.target is aten.matmul.default and rank(b) == 2 and rank(a) > 1:
        return [a]  # x @ w, w shared by all rows
    both = rank(a) == rank(b) and rank(a) > 2 and size(a)[0] == size(b)[0]
    return [a, b] if both else None


def indexed(node: fx.Node) -> list[fx.Node] | None:
    """x[:, rows] carries x's rows; table[ids] is a lookup and carries those of ids."""
    source, indices = arguments(node)
    if indices[0] is None:
        return [source]
    return list(indices) if len(indices) == 1 and rank(indices[0]) > 0 else None


def looked_up(position: int) -> Rule:
    return lambda node: [arg(node, position)] if rank(arg(node, position)) > 0 else None


def along_rows(*positions: int) -> Rule:
    """Ops along an axis (argument 1) other than 0, whose tensor arguments at `positions` have the same rows."""

    def rule(node: fx.Node) -> list[fx.Node] | None:
        carriers = [arguments(node)[position] for position in positions]
        same = all(rank(each) > 1 and size(each)[0] == size(node)[0] for each in carriers)
        return carriers if same and axis(arguments(node)[1], rank(node)) != 0 else None

    return rule


def routed(node: fx.Node) -> list[fx.Node] | None:
    """x, expert ids and scores carry rows, the experts are shared."""
    return list(node.args[:3])  # type: ignore[arg-type]


RULES: dict[Any, Rule] = {
    operator.getitem: first,
    aten.to.dtype: first,
    aten.linear.default: first,
    aten.layer_norm.default: normalised,
    aten.embedding.default: looked_up(1),
    aten.mean.dim: spares_axis_0(1),
    aten.sum.dim_IntList: spares_axis_0(1),
    aten.amax.default: spares_axis_0(1),
    aten.std.dim: spares_axis_0(1),
    aten.softmax.int: spares_axis_0(1),
    aten.topk.default: spares_axis_0(2),
    aten.slice.Tensor: spares_axis_0(1),
    aten.select.int: spares_axis_0(1),
    aten.unsqueeze.default: spares_axis_0(1),
    aten.squeeze.dim: spares_axis_0(1),
    aten.split_with_sizes.default: spares_axis_0(2),
    aten.repeat_interleave.self_int: spares_axis_0(2),
    aten.transpose.int: swapped,
    aten.permute.default: permuted,
    aten.cat.default: joined,
    aten.stack.default: joined,
    aten.reshape.default: same_first_size,
    aten.expand.default: same_first_size,
    aten.matmul.default: batched,
    aten.bmm.default: batched,
    aten.index.Tensor: indexed,
    aten.max.dim: spares_axis_0(1),
    aten.gather.default: along_rows(0, 2),
    aten.scatter.value: along_rows(0, 2),
    aten.scatter.src: along_rows(0, 2, 3),
    llmbuild.moe_experts.default: routed,
    llmbuild.moe_experts_blockwise.default: routed,
    llmbuild.rms_norm.default: first,
    llmbuild.add_rms_norm.default: two,
    llmbuild.rope.default: rotated,
    llmbuild.gated_activation.default: two,
    llmbuild.linear_blockwise.default: first,
    llmbuild.round_rows.default: first,
    llmbuild.embedding_blockwise.default: looked_up(0),
}
