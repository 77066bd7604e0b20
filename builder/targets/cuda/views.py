"""Ops that move nothing: an element of the result is an element of the source, at another index.

    step(node, index of an element of node) -> (source, index of that element in source)

Rows (the token axis) are symbolic; an index has one entry for each axis of its tensor, the row axis included.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import Size, arg, arguments, axis, is_call, plain_size, rank, size
from llmbuild.builder.targets.cuda.index import Index

aten = torch.ops.aten

Indices = tuple[Index, ...]
ZERO = Index()


class NoRule(Exception):
    """A node that the generator cannot express: which, and why."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{node.name}: {reason}")
        self.node, self.reason = node, reason


def step(node: fx.Node, index: Indices) -> tuple[fx.Node, Indices] | None:
    """Look through one view. Returns None when `node` is no view.

    Raises:
        NoRule: It is one, of a form that is not known.
    """
    if is_call(node, operator.getitem):
        producer: fx.Node = arg(node, 0)
        rule = PARTS.get(producer.target)
        return None if rule is None else (arg(producer, 0), rule(node, producer, index))
    view = VIEWS.get(node.target) if node.op == "call_function" else None
    return None if view is None else (arg(node, 0), view(node, index))


def is_view(node: fx.Node) -> bool:
    if is_call(node, operator.getitem):
        return arg(node, 0).target in PARTS
    return node.op == "call_function" and node.target in VIEWS


def base(node: fx.Node) -> fx.Node:
    """Return what `node` is a view of, or itself."""
    while is_view(node):
        node = arg(arg(node, 0), 0) if is_call(node, operator.getitem) else arg(node, 0)
    return node


def broadcast(index: Indices, to: Size) -> Indices:
    """Return the index in an operand of shape `to` that stands for `index` in the result."""
    tail = index[len(index) - len(to) :]
    return tuple(ZERO if dim == 1 else each for each, dim in zip(tail, to, strict=True))


def reshaped(node: fx.Node, index: Indices) -> Indices:
    """Index in the source of a reshape. Axes are matched in groups of equal size; rows may lead one group."""
    want, have = size(node), size(arg(node, 0))
    result: list[Index] = []
    for have_dims, want_dims, place in groups(node, have, want):
        result += unflatten(node, flatten(node, index[place : place + len(want_dims)], want_dims), have_dims)
    return tuple(result)


def groups(node: fx.Node, have: Size, want: Size) -> list[tuple[Size, Size, int]]:
    """Return the smallest groups (axes of the source, axes of the result, first axis of these) of equal size."""
    found = []
    i = j = 0
    while i < len(have) or j < len(want):
        first_i, first_j = i, j
        i, j = min(i + 1, len(have)), min(j + 1, len(want))
        while (a := product(have[first_i:i])) != (b := product(want[first_j:j])):
            grow_want = j < len(want) and (i == len(have) or divides(b, a))
            if not grow_want and i == len(have):
                raise NoRule(node, f"a reshape of {list(have)} to {list(want)}")
            i, j = (i, j + 1) if grow_want else (i + 1, j)
        found.append((have[first_i:i], want[first_j:j], first_j))
    return found


def product(dims: Size) -> Any:
    return math.prod(dims)


def divides(part: Any, whole: Any) -> bool:
    """Whether `whole` is a multiple of `part`, symbols included."""
    if isinstance(part, int) and isinstance(whole, int):
        return whole % part == 0
    return bool(getattr(whole / part, "is_integer", False)) or part == 1


def flatten(node: fx.Node, index: Indices, dims: Size) -> Index:
    flat, stride = ZERO, 1
    for place in reversed(range(len(dims))):
        flat = flat + index[place] * stride
        if place and not isinstance(dims[place], int):
            if any(dim != 1 for dim in dims[:place]):
                raise NoRule(node, f"rows that are not the first axis of {list(dims)} are folded into another")
        elif place:
            stride *= int(dims[place])
    return flat


def unflatten(node: fx.Node, flat: Index, dims: Size) -> list[Index]:
    parts: list[Index] = []
    for place in reversed(range(len(dims))):
        dim = dims[place]
        if place == 0 or all(before == 1 for before in dims[:place]):
            parts += [flat] + [ZERO] * place
            break
        if not isinstance(dim, int):
            raise NoRule(node, f"rows become an inner axis of {list(dims)}")
        flat, rest = flat.divide(dim)
        parts.append(rest)
    return parts[::-1]


def transposed(node: fx.Node, index: Indices) -> Indices:
    order = list(range(rank(node)))
    a, b = (axis(dim, len(order)) for dim in arguments(node)[1:3])
    order[a], order[b] = order[b], order[a]
    return tuple(index[place] for place in order)


def permuted(node: fx.Node, index: Indices) -> Indices:
    order = [axis(dim, rank(node)) for dim in arg(node, 1)]
    return tuple(index[order.index(place)] for place in range(len(order)))


def replaced(index: Indices, place: int, by: Index) -> Indices:
    return (*index[:place], by, *index[place + 1 :])


def sliced(node: fx.Node, index: Indices) -> Indices:
    source, dim, begin, end, by = arguments(node)
    place = axis(dim, rank(source))
    width = size(source)[place]
    if not isinstance(width, int):
        if begin in (0, None) and by == 1 and size(node)[place] == width:
            return index
        raise NoRule(node, f"it takes rows {begin}:{end}")
    begin, _, by = slice(begin, end, by).indices(width)
    return replaced(index, place, index[place] * by + begin)


def selected(node: fx.Node, index: Indices) -> Indices:
    source, dim, which = arguments(node)
    place = axis(dim, rank(source))
    width = size(source)[place]
    if not isinstance(width, int):
        raise NoRule(node, f"it takes row {which}")
    return (*index[:place], Index((), axis(which, width)), *index[place:])


def expanded(node: fx.Node, index: Indices) -> Indices:
    return broadcast(index, size(arg(node, 0)))


def repeated_each(node: fx.Node, index: Indices) -> Indices:
    """repeat_interleave: [a, b] -> [a, a, b, b]"""
    source, times, dim = arguments(node)[:3]
    if dim is None:
        raise NoRule(node, "it repeats a flattened tensor")
    place = axis(dim, rank(source))
    return replaced(index, place, index[place].divide(times)[0])


def repeated(node: fx.Node, index: Indices) -> Indices:
    """repeat: [a, b] -> [a, b, a, b]"""
    source, times = arguments(node)
    dims = size(source)
    tail, factors = index[len(index) - len(dims) :], times[len(times) - len(dims) :]
    parts = []
    for each, dim, factor in zip(tail, dims, factors, strict=True):
        if not isinstance(factor, int) or (factor != 1 and not isinstance(dim, int)):
            raise NoRule(node, f"it repeats {times} times")
        parts.append(each if factor == 1 else each.divide(int(dim))[1])
    return tuple(parts)


def flipped(node: fx.Node, index: Indices) -> Indices:
    for dim in arg(node, 1):
        place = axis(dim, rank(node))
        width = size(node)[place]
        if not isinstance(width, int):
            raise NoRule(node, "it reverses rows")
        index = replaced(index, place, index[place] * -1 + (width - 1))
    return index


def same(node: fx.Node, index: Indices) -> Indices:
    return index


def dropped_out(node: fx.Node, index: Indices) -> Indices:
    if arg(node, 2) is not False:
        raise NoRule(node, "dropout as in training")
    return index


def split_part(node: fx.Node, split: fx.Node, index: Indices) -> Indices:
    """Part `which` of a split begins where those before it end."""
    source, which = arg(split, 0), arg(node, 1)
    place = axis(arguments(split)[2], rank(source))
    widths = [plain_size(part.shape)[place] for part in split.meta["val"]]
    if not all(isinstance(width, int) for width in widths):
        raise NoRule(split, "it splits rows")
    return replaced(index, place, index[place] + sum(int(width) for width in widths[:which]))


def unbound_part(node: fx.Node, unbind: fx.Node, index: Indices) -> Indices:
    source, dim = arguments(unbind)
    place = axis(dim, rank(source))
    return (*index[:place], Index((), arg(node, 1)), *index[place:])


Rule = Callable[[fx.Node, Indices], Indices]
VIEWS: dict[Any, Rule] = {
    **{
        op: reshaped
        for op in (
            aten.reshape.default,
            aten.view.default,
            aten._unsafe_view.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
        )
    },
    **{
        op: same
        for op in (
            aten.alias.default,
            aten.contiguous.default,
            aten.clone.default,
            aten.detach.default,
            aten.lift_fresh_copy.default,
        )
    },
    aten.dropout.default: dropped_out,
    aten.transpose.int: transposed,
    aten.permute.default: permuted,
    aten.slice.Tensor: sliced,
    aten.select.int: selected,
    aten.expand.default: expanded,
    aten.repeat_interleave.self_int: repeated_each,
    aten.repeat.default: repeated,
    aten.flip.default: flipped,
}
PARTS: dict[Any, Callable[[fx.Node, fx.Node, Indices], Indices]] = {
    aten.split.Tensor: split_part,
    aten.split_with_sizes.default: split_part,
    aten.chunk.default: split_part,
    aten.unbind.int: unbound_part,
}
