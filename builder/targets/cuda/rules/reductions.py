"""Ops that need a row's channels together: sums, means, softmax, norms. Each gives one number for a row, shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, axis, rank, size
from llmbuild.builder.targets.cuda.index import Index
from llmbuild.builder.targets.cuda.rules.pointwise import Rule
from llmbuild.builder.targets.cuda.section import MAX, SUM, Reduction, Section, Value, kind, literal
from llmbuild.builder.targets.cuda.views import Indices, NoRule

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild


def over(
    section: Section,
    node: fx.Node,
    name: str,
    source: fx.Node,
    axes: Sequence[int],
    others: Indices,
    how: Reduction = SUM,
    term: Callable[[Value, Indices], Value] = lambda x, others: x,
) -> Value:
    """Return the reduction of term(source, others) over `axes` (ascending, not negative).

    `others` index the axes that stay. The term is told them: it may be written for each place that they run through.
    """
    dims = size(source)
    stays = [place for place in range(len(dims)) if place not in axes]
    if any(not isinstance(dims[place], int) for place in axes):
        raise NoRule(node, "it reduces over rows")
    extents = [int(dims[place]) for place in axes]

    def at(outer: Indices, flat: Index) -> Value:
        index = dict(zip(stays, outer, strict=True))
        for place, extent in reversed(list(zip(axes, extents, strict=True))):
            flat, index[place] = flat.divide(extent) if place != axes[0] else (Index(), flat)
        x = section.value(source, tuple(index[place] for place in range(len(dims))))
        return term(x, outer)

    sizes = tuple(dims[place] for place in stays)
    return section.reduce(node, name, others, sizes, math.prod(extents), at, how)


def reduced(section: Section, node: fx.Node, index: Indices, how: Reduction, mean: bool = False) -> Value:
    source, dims, keep = (*arguments(node), False)[:3]
    axes = sorted(
        {axis(dim, rank(source)) for dim in ([dims] if isinstance(dims, int) else dims or range(rank(source)))}
    )
    others = tuple(each for place, each in enumerate(index) if place not in axes) if keep else index
    if how is MAX and kind(source) != "float":
        raise NoRule(node, f"the largest of {kind(source)}s")
    total = over(section, node, node.name, source, axes, others, how, lambda x, _: section.converted(x, kind(node)))
    if not mean:
        return total
    return scaled(section, f"{node.name}_mean", total, math.prod(int(size(source)[place]) for place in axes))


def scaled(section: Section, name: str, total: Value, count: float) -> Value:
    return section.emit(name, f"{total.text} / {literal(count, 'float')}", "float", total)


def moments(
    section: Section, node: fx.Node, source: fx.Node, axes: Sequence[int], others: Indices, correction: float = 0
) -> tuple[Value, Value]:
    """Return mean and variance over `axes`, in two passes: the second sees distances from the mean."""
    count = math.prod(int(size(source)[place]) for place in axes)

    def mean(at: Indices) -> Value:
        return scaled(section, f"{node.name}_mean", over(section, node, f"{node.name}_sum", source, axes, at), count)

    def squared(x: Value, at: Indices) -> Value:
        center = mean(at)
        distance = section.emit(f"{node.name}_distance", f"{x.text} - {center.text}", "float", x, center)
        return section.emit(f"{node.name}_squared", f"{distance.text} * {distance.text}", "float", distance)

    squares = over(section, node, f"{node.name}_squares", source, axes, others, SUM, squared)
    return mean(others), scaled(section, f"{node.name}_var", squares, count - correction)


def spread(section: Section, node: fx.Node, index: Indices, root: bool) -> Value:
    """var and std."""
    source, dims, unbiased, keep = arguments(node)[:4]
    axes = sorted({axis(dim, rank(source)) for dim in dims})
    others = tuple(each for place, each in enumerate(index) if place not in axes) if keep else index
    _, variance = moments(section, node, source, axes, others, int(unbiased))
    return section.emit(node.name, f"tl.sqrt({variance.text})", "float", variance) if root else variance


def softmax(section: Section, node: fx.Node, index: Indices) -> Value:
    source, dim = arguments(node)[:2]
    place = axis(dim, rank(source))
    others = (*index[:place], *index[place + 1 :])

    def exponential(x: Value, at: Indices) -> Value:
        highest = over(section, node, f"{node.name}_max", source, [place], at, MAX)
        return section.emit(f"{node.name}_exp", f"tl.exp({x.text} - {highest.text})", "float", x, highest)

    total = over(section, node, f"{node.name}_sum", source, [place], others, SUM, exponential)
    top = exponential(section.value(source, index), others)
    return section.emit(node.name, f"{top.text} / {total.text}", "float", top, total)


def rms_norm(section: Section, node: fx.Node, index: Indices) -> Value:
    source, weight, epsilon, _ = arguments(node)
    return normalised(section, node, lambda at: section.value(source, at), source, index, weight, epsilon)


def add_rms_norm(section: Section, node: fx.Node, index: Indices, output: int) -> Value:
    """s = x + residual; output 0 is the norm of s, output 1 is s."""
    x, residual, weight, epsilon, _ = arguments(node)

    def total(at: Indices) -> Value:
        a, b = section.value(x, at), section.value(residual, at)
        return section.emit(f"{node.name}_total", f"{a.text} + {b.text}", "float", a, b)

    return total(index) if output else normalised(section, node, total, x, index, weight, epsilon)


def normalised(
    section: Section,
    node: fx.Node,
    value: Callable[[Indices], Value],
    like: fx.Node,
    index: Indices,
    weight: Any,
    epsilon: float,
) -> Value:
    """value · rsqrt(mean(value²) + ε) · weight over the last axis; `like` has the shape of the value."""
    dims = size(like)

    def squared(others: Indices, channel: Index) -> Value:
        x = value((*others, channel))
        return section.emit(f"{node.name}_squared", f"{x.text} * {x.text}", "float", x)

    squares = section.reduce(node, f"{node.name}_squares", index[:-1], dims[:-1], dims[-1], squared, SUM)
    scale = f"tl.rsqrt({squares.text} / {literal(dims[-1], 'float')} + {literal(epsilon, 'float')})"
    inverse = section.emit(f"{node.name}_scale", scale, "float", squares)
    x = value(index)
    result = section.emit(node.name, f"{x.text} * {inverse.text}", "float", x, inverse)
    return weighted(section, node, result, index, weight, "*")


def weighted(section: Section, node: fx.Node, x: Value, index: Indices, weight: Any, sign: str) -> Value:
    if weight is None:
        return x
    w = section.operand(weight, "float", index)
    return section.emit(node.name, f"{x.text} {sign} {w.text}", "float", x, w)


def layer_norm(section: Section, node: fx.Node, index: Indices) -> Value:
    source, shape, weight, bias, epsilon = arguments(node)[:5]
    if len(shape) != 1:
        raise NoRule(node, f"it normalises over {len(shape)} axes")
    mean, variance = moments(section, node, source, [rank(source) - 1], index[:-1])
    scale = f"tl.rsqrt({variance.text} + {literal(epsilon, 'float')})"
    inverse = section.emit(f"{node.name}_scale", scale, "float", variance)
    x = section.value(source, index)
    text = f"({x.text} - {mean.text}) * {inverse.text}"
    result = section.emit(node.name, text, "float", x, mean, inverse)
    result = weighted(section, node, result, index, weight, "*")
    return weighted(section, node, result, index, bias, "+")


def small_product(section: Section, node: fx.Node, index: Indices) -> Value:
    """A product of two values of one token: Σ_k a[.., i, k] · b[.., k, j]."""
    left, right = node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    a_dims, b_dims = size(left), size(right)
    if len(a_dims) < 2 or len(b_dims) < 2:
        raise NoRule(node, f"a product of {list(a_dims)} and {list(b_dims)}")
    batch, i, j = index[:-2], index[-2], index[-1]

    def place(outer: Indices, dims: Any) -> Indices:
        tail = outer[len(outer) - (len(dims) - 2) :]
        return tuple(Index() if dim == 1 else each for each, dim in zip(tail, dims[:-2], strict=True))

    def term(at: Indices, k: Index) -> Value:
        outer, row, column = at[:-2], at[-2], at[-1]
        a = section.value(left, (*place(outer, a_dims), row, k))
        b = section.value(right, (*place(outer, b_dims), k, column))
        return section.emit(f"{node.name}_term", f"{a.text} * {b.text}", kind(node), a, b)

    return section.reduce(node, node.name, (*batch, i, j), size(node), a_dims[-1], term, SUM)


RULES: dict[Any, Rule] = {
    aten.sum.dim_IntList: partial(reduced, how=SUM),
    aten.mean.dim: partial(reduced, how=SUM, mean=True),
    aten.amax.default: partial(reduced, how=MAX),
    aten.var.dim: partial(spread, root=False),
    aten.std.dim: partial(spread, root=True),
    aten.softmax.int: softmax,
    aten._softmax.default: softmax,
    aten.layer_norm.default: layer_norm,
    aten.matmul.default: small_product,
    aten.bmm.default: small_product,
    llmbuild.rms_norm.default: rms_norm,
}
PARTS: dict[Any, Callable[[Section, fx.Node, Indices, int], Value]] = {llmbuild.add_rms_norm.default: add_rms_norm}
