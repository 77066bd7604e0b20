"""Ops that move, select or repeat elements without computing on them."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, axis, dtype, rank, size
from llmbuild.builder.targets.onnx_graph.emitter import Emitter
from llmbuild.builder.targets.onnx_graph.rule import INT64_MAX, Rule, cast, onnx_shape, reshape

aten = torch.ops.aten


def result_shape(node: fx.Node) -> list[int] | None:
    return onnx_shape(size(node))


def one_symbol(node: fx.Node) -> str | None:
    return None if result_shape(node) is not None else f"its shape {size(node)} has two symbolic axes"


def same(e: Emitter, node: fx.Node) -> str:
    return e.tensor(node.args[0])


def to_result_shape(e: Emitter, node: fx.Node) -> str:
    """view, reshape, flatten, squeeze and unsqueeze are all a Reshape to the shape that tracing found."""
    dims = result_shape(node)
    assert dims is not None
    return reshape(e, e.tensor(node.args[0]), *dims)


def convert(e: Emitter, node: fx.Node) -> str:
    source: Any = node.args[0]
    return cast(e, e.tensor(source), dtype(source), dtype(node))


def transpose(e: Emitter, node: fx.Node) -> str:
    source, first, second = arguments(node)[:3]
    order = list(range(rank(source)))
    a, b = axis(first, len(order)), axis(second, len(order))
    order[a], order[b] = order[b], order[a]
    return e.op("Transpose", e.tensor(source), perm=order)


def permute(e: Emitter, node: fx.Node) -> str:
    source, order = arguments(node)[:2]
    return e.op("Transpose", e.tensor(source), perm=[axis(i, rank(source)) for i in order])


def select(e: Emitter, node: fx.Node) -> str:
    source, dim, index = arguments(node)
    return e.op("Gather", e.tensor(source), e.constant(index, np.int64), axis=axis(dim, rank(source)))


def slice_(e: Emitter, node: fx.Node) -> str:
    source, dim, start, end, step = arguments(node)
    start, end = start or 0, INT64_MAX if end is None else end
    where = axis(dim or 0, rank(source))
    return e.op("Slice", e.tensor(source), e.ints(start), e.ints(end), e.ints(where), e.ints(step))


def fixed_bounds(node: fx.Node) -> str | None:
    _, _, start, end, step = arguments(node)
    fixed = all(bound is None or isinstance(bound, int) for bound in (start, end, step))
    return None if fixed else f"its bounds {start}:{end}:{step} are not constants"


def split(e: Emitter, node: fx.Node) -> tuple[str, ...]:
    """split, split_with_sizes and chunk: the widths are those that tracing found."""
    source = node.args[0]
    dim = axis(arguments(node)[2], rank(source))  # type: ignore[arg-type]
    widths = [int(part.shape[dim]) for part in node.meta["val"]]
    return e.ops("Split", e.tensor(source), e.ints(*widths), outputs=len(widths), axis=dim)


def fixed_widths(node: fx.Node) -> str | None:
    source: Any = node.args[0]
    dim = axis(arguments(node)[2], rank(source))
    return None if isinstance(size(source)[dim], int) else "it splits the token axis"


def getitem(e: Emitter, node: fx.Node) -> str:
    source, index = node.args
    return e.values[source][index]  # type: ignore[index]


def cat(e: Emitter, node: fx.Node) -> str:
    tensors, dim = arguments(node)[:2]
    names = [cast(e, e.tensor(tensor), dtype(tensor), dtype(node)) for tensor in tensors]
    return e.op("Concat", *names, axis=axis(dim, rank(node)))


def stack(e: Emitter, node: fx.Node) -> str:
    tensors, dim = arguments(node)[:2]
    where = axis(dim, rank(node))
    names = [e.op("Unsqueeze", e.tensor(tensor), e.ints(where)) for tensor in tensors]
    return e.op("Concat", *names, axis=where)


def expand(e: Emitter, node: fx.Node) -> str:
    """ONNX's Expand broadcasts, so an axis that keeps its size (the token axis among them) is asked for as 1."""
    source: Any = node.args[0]
    have = (1,) * (rank(node) - rank(source)) + size(source)
    want = [1 if now == then else int(then) for now, then in zip(have, size(node), strict=True)]
    return e.op("Expand", e.tensor(source), e.ints(*want))


def fixed_expansion(node: fx.Node) -> str | None:
    source: Any = node.args[0]
    have = (1,) * (rank(node) - rank(source)) + size(source)
    bad = [then for now, then in zip(have, size(node), strict=True) if now != then and not isinstance(then, int)]
    return f"it expands an axis to the symbolic size {bad[0]}" if bad else None


def repeat_interleave(e: Emitter, node: fx.Node) -> str:
    """x [.., n, ..] -> [.., n, 1, ..] -> [.., n, r, ..] -> [.., n·r, ..]"""
    source, repeats, dim = arguments(node)[:3]
    where = axis(dim, rank(source))
    name = e.op("Unsqueeze", e.tensor(source), e.ints(where + 1))
    ones = [1] * (rank(source) + 1)
    ones[where + 1] = repeats
    dims = result_shape(node)
    assert dims is not None
    return reshape(e, e.op("Expand", name, e.ints(*ones)), *dims)


def repeat(e: Emitter, node: fx.Node) -> str:
    """The whole tensor several times along each axis; more factors than axes add axes in front."""
    source, factors = arguments(node)
    name = e.tensor(source)
    added = len(factors) - rank(source)
    if added:
        name = e.op("Unsqueeze", name, e.ints(*range(added)))
    return e.op("Tile", name, e.ints(*factors))


def fixed_factors(node: fx.Node) -> str | None:
    factors: Any = node.args[1]
    return None if all(isinstance(factor, int) for factor in factors) else f"it repeats {factors} times"


def index(e: Emitter, node: fx.Node) -> str:
    source, indices = node.args
    where = next(i for i, item in enumerate(indices) if item is not None)  # type: ignore[arg-type]
    return e.op("Gather", e.tensor(source), e.tensor(indices[where]), axis=where)  # type: ignore[index]


def one_index(node: fx.Node) -> str | None:
    indices: Any = node.args[1]
    if sum(item is not None for item in indices) != 1:
        return "it indexes several axes at once"
    return None


def index_select(e: Emitter, node: fx.Node) -> str:
    source, dim, rows = arguments(node)[:3]
    return e.op("Gather", e.tensor(source), e.tensor(rows), axis=axis(dim, rank(source)))


RULES: dict[Any, Rule] = {
    operator.getitem: Rule(getitem),
    **{
        op: Rule(same)
        for op in (
            aten.alias.default,
            aten.contiguous.default,
            aten.clone.default,
            aten.detach.default,
            aten.dropout.default,
        )
    },
    **{
        op: Rule(convert)
        for op in (
            aten.to.dtype,
            aten.to.device,
            aten.to.dtype_layout,
            aten.type_as.default,
            aten._to_copy.default,
        )
    },
    **{
        op: Rule(to_result_shape, one_symbol)
        for op in (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.flatten.using_ints,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.squeeze.default,
            aten.unsqueeze.default,
        )
    },
    aten.transpose.int: Rule(transpose),
    aten.permute.default: Rule(permute),
    aten.select.int: Rule(select),
    aten.slice.Tensor: Rule(slice_, fixed_bounds),
    aten.split.Tensor: Rule(split, fixed_widths),
    aten.split_with_sizes.default: Rule(split, fixed_widths),
    aten.chunk.default: Rule(split, fixed_widths),
    aten.cat.default: Rule(cat),
    aten.stack.default: Rule(stack),
    aten.expand.default: Rule(expand, fixed_expansion),
    aten.repeat_interleave.self_int: Rule(repeat_interleave, one_symbol),
    aten.repeat.default: Rule(repeat, fixed_factors),
    aten.index.Tensor: Rule(index, one_index),
    aten.index_select.default: Rule(index_select),
}
