"""What routers of mixtures of experts need: the best of a row, and picking or marking by index along it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, axis, rank, size
from llmbuild.builder.targets.cuda.rules.pointwise import Rule
from llmbuild.builder.targets.cuda.section import MAX_UNROLLED, Section, Value, kind, masked
from llmbuild.builder.targets.cuda.views import Indices, NoRule, replaced

aten = torch.ops.aten

MAX_CANDIDATES = 1024


def best(
    section: Section, node: fx.Node, source: fx.Node, place: int, others: Indices, count: int
) -> tuple[list[Value], list[Value]]:
    """Return the `count` largest along an axis and where they are, largest first; of equal ones the first.

    One after the other: the largest, the first place that has it, that place out of the race.
    """
    extent = size(source)[place]
    if not isinstance(extent, int) or extent > MAX_CANDIDATES or count > MAX_UNROLLED or kind(source) != "float":
        raise NoRule(node, f"the best {count} of {extent} {kind(source)}s")

    def whole(at: Indices) -> list[Value]:
        section.reduces = True
        lane = section.lane(extent)
        x = section.value(source, (*at[:place], lane, *at[place:]))
        lowest = Value('float("-inf")', "float")
        x = section.where(f"{node.name}_left", masked(lane) or f"{lane.text} >= 0", lane.axes, x, lowest)
        found: list[Value] = []
        for _ in range(count):
            top = section.emit(f"{node.name}_top", f"tl.max({x.text}, axis=1, keep_dims=True)", "float", x.axes - {1})
            ties = section.emit(
                f"{node.name}_ties", f"tl.where({x.text} == {top.text}, {lane.text}, {extent - 1})", "int", x, top
            )
            where = section.emit(
                f"{node.name}_place", f"tl.min({ties.text}, axis=1, keep_dims=True)", "int", ties.axes - {1}
            )
            x = section.where(f"{node.name}_left", f"{lane.text} == {where.text}", lane.axes, lowest, x)
            found += [top, where]
        return found

    sizes = tuple(dim for axis_, dim in enumerate(size(source)) if axis_ != place)
    found = section.once(
        (node, "best", others), lambda: section.each_channel(node, f"{node.name}_best", others, sizes, whole)
    )
    return found[0::2], found[1::2]


def topk(section: Section, node: fx.Node, index: Indices, output: int) -> Value:
    source, count, dim, largest, _ = arguments(node)
    if not largest or not isinstance(count, int):
        raise NoRule(node, "the smallest, or a number of them that is not constant")
    place = axis(dim, rank(source))
    others = (*index[:place], *index[place + 1 :])
    return section.pick(node.name, index[place], best(section, node, source, place, others, count)[output])


def max_with_index(section: Section, node: fx.Node, index: Indices, output: int) -> Value:
    source, dim, keep = arguments(node)
    place = axis(dim, rank(source))
    others = (*index[:place], *index[place + 1 :]) if keep else index
    return best(section, node, source, place, others, 1)[output][0]


def gather(section: Section, node: fx.Node, index: Indices) -> Value:
    """x[.., ids[index], ..]"""
    source, dim, ids = arguments(node)[:3]
    place = axis(dim, rank(source))
    number = section.as_index(section.value(ids, index), size(source)[place])
    return section.value(source, replaced(index, place, number))


def scatter(section: Section, node: fx.Node, index: Indices) -> Value:
    """x with the elements at `ids` along an axis replaced: each id is compared with the index."""
    source, dim, ids, filling = arguments(node)[:4]
    place = axis(dim, rank(source))
    count = size(ids)[place]
    if not isinstance(count, int) or count > MAX_UNROLLED:
        raise NoRule(node, f"it replaces {count} elements")
    result = section.operand(source, kind(node), index)
    at = index[place]
    for number in range(count):
        each = (*index[:place], at * 0 + number, *index[place + 1 :])
        where = section.value(ids, each)
        value = (
            section.value(filling, each) if isinstance(filling, fx.Node) else section.operand(filling, kind(node), each)
        )
        hit = section.emit(f"{node.name}_hit", f"{where.text} == {at.grouped}", "bool", where, at.axes)
        result = section.where(node.name, hit.text, hit.axes, value, result)
    return result


RULES: dict[Any, Rule] = {
    aten.gather.default: gather,
    aten.scatter.value: scatter,
    aten.scatter.src: scatter,
}
PARTS: dict[Any, Callable[[Section, fx.Node, Indices, int], Value]] = {
    aten.topk.default: topk,
    aten.max.dim: max_with_index,
}
