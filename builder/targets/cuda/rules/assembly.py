"""Values put together from pieces of others: rotations, joins, tensors filled slice by slice, lookups by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, axis, rank, size
from llmbuild.builder.targets.cuda.index import Index, Var
from llmbuild.builder.targets.cuda.rules.pointwise import Rule
from llmbuild.builder.targets.cuda.section import Section, Value, kind
from llmbuild.builder.targets.cuda.views import Indices, NoRule, replaced

aten = torch.ops.aten


def rope(section: Section, node: fx.Node, index: Indices) -> Value:
    """x at the index and at its partner's: y = x·cos ∓ partner·sin, minus for the first of a pair.

    half layout:   pairs (i, i + R/2)     partner (d + R/2) % R,   angle d % (R/2)
    interleaved:   pairs (2i, 2i + 1)     partner d + 1 - 2·(d % 2), angle d // 2
    """
    source, cos, sin, interleaved = arguments(node)
    half, width = size(cos)[-1], size(source)[-1]
    assert isinstance(half, int) and isinstance(width, int)
    outer, d = index[:-1], index[-1]
    if interleaved:
        pair, second = d.divide(2)
        partner = d + 1 + second * -2
        angle = pair.divide(half)[1]
        is_first = f"{second.grouped} == 0"
    else:
        partner, angle = (d + half).divide(2 * half)[1], d.divide(half)[1]
        is_first = f"{d.grouped} < {half}"
    x, other = section.value(source, index), section.value(source, (*outer, partner))
    tables = [section.operand(table, "float", (*outer[:-1], angle)) for table in (cos, sin)]
    c, s = tables
    signed = section.emit(
        f"{node.name}_partner", f"tl.where({is_first}, -{other.text}, {other.text})", "float", d.axes, other
    )
    text = f"{x.text} * {c.text} + {signed.text} * {s.text}"
    turned = section.emit(node.name, text, "float", x, c, signed, s)
    if 2 * half == width:
        return turned
    return section.where(node.name, f"{d.grouped} < {2 * half}", d.axes, turned, x)


def cat(section: Section, node: fx.Node, index: Indices) -> Value:
    tensors, dim = arguments(node)[:2]
    place = axis(dim, rank(node))
    widths = [size(tensor)[place] for tensor in tensors]
    if not all(isinstance(width, int) for width in widths):
        raise NoRule(node, "it joins rows")
    return joined(section, node, index, place, list(zip(tensors, widths, strict=True)))


def joined(section: Section, node: fx.Node, index: Indices, place: int, parts: Sequence[tuple[fx.Node, Any]]) -> Value:
    """Return the value of the part that `index[place]` lies in; each part is read only where it is wanted."""
    at, begin = index[place], 0
    found: Value | None = None
    for tensor, width in parts:
        end = begin + width
        inner = within(at, begin, end)
        if inner is not None:
            value = section.operand(tensor, kind(node), replaced(index, place, inner))
            if found is None:
                found = value
            else:
                found = section.where(node.name, f"{at.grouped} < {begin}", at.axes, found, value)
        begin = end
    assert found is not None
    return found


def within(at: Index, begin: int, end: int) -> Index | None:
    """Return `at - begin` as an index of a part [begin, end), or None when it never lies there.

    Where it lies outside, nothing is read: the condition travels with the index as its mask.
    """
    if (at.low is not None and at.low >= end) or (at.high is not None and at.high < begin):
        return None
    if at.low is not None and at.low >= begin and at.high is not None and at.high < end:
        return at + -begin
    tests = []
    if at.low is None or at.low < begin:
        tests.append(f"{at.grouped} >= {begin}")
    if at.high is None or at.high >= end:
        tests.append(f"{at.grouped} < {end}")
    shifted = at + -begin
    return index_of_part(shifted, end - begin, (*at.masks, *tests))


def index_of_part(index: Index, extent: int, masks: tuple[str, ...]) -> Index:
    return Index(((Var(f"({index.text})", extent, index.axes, masks), 1),))


def stack(section: Section, node: fx.Node, index: Indices) -> Value:
    tensors, dim = arguments(node)[:2]
    place = axis(dim, rank(node))
    at, rest = index[place], (*index[:place], *index[place + 1 :])
    if at.constant is not None:
        return section.operand(tensors[at.constant], kind(node), rest)
    values = [section.operand(tensor, kind(node), rest) for tensor in tensors]
    return section.pick(node.name, at, values)


def slice_scatter(section: Section, node: fx.Node, index: Indices) -> Value:
    """base[.., begin:end:step, ..] = source"""
    base, source, dim, begin, end, step = arguments(node)
    place = axis(dim, rank(base))
    width = size(base)[place]
    if not isinstance(width, int):
        raise NoRule(node, "it fills rows")
    begin, end, step = slice(begin, end, step).indices(width)
    at = index[place]
    inside = within(at, begin, end)
    below = section.operand(base, kind(node), index)
    if inside is None:
        return below
    number, rest = inside.divide(step)
    tests = [*(f"({mask})" for mask in inside.masks if mask not in at.masks)]
    if rest.constant is None:
        tests.append(f"({rest.grouped} == 0)")
    elif rest.constant:
        return below
    value = section.operand(source, kind(node), replaced(index, place, number))
    return section.where(node.name, " & ".join(tests), at.axes, value, below) if tests else value


def select_scatter(section: Section, node: fx.Node, index: Indices) -> Value:
    """base[.., which, ..] = source"""
    base, source, dim, which = arguments(node)
    place = axis(dim, rank(base))
    width = size(base)[place]
    if not isinstance(width, int):
        raise NoRule(node, "it fills a row")
    at, which = index[place], axis(which, width)
    rest = (*index[:place], *index[place + 1 :])
    if at.constant is not None:
        return section.operand(source, kind(node), rest) if at.constant == which else section.value(base, index)
    value, below = section.operand(source, kind(node), rest), section.operand(base, kind(node), index)
    return section.where(node.name, f"{at.grouped} == {which}", at.axes, value, below)


def looked_up(
    section: Section, node: fx.Node, table: fx.Node, place: int, ids: fx.Node, index: Indices, *, wraps: bool = False
) -> Value:
    """table[.., ids[index of ids], ..]: the axis at `place` is replaced by those of ids. wraps: -1 is the last."""
    value = section.value(ids, index[place : place + rank(ids)])
    extent = size(table)[place]
    if wraps and isinstance(extent, int):
        value = section.emit(
            f"{node.name}_place", f"tl.where({value.text} < 0, {value.text} + {extent}, {value.text})", "int", value
        )
    at = (*index[:place], section.as_index(value, extent), *index[place + rank(ids) :])
    return section.operand(table, kind(node), at)


def embedding(section: Section, node: fx.Node, index: Indices) -> Value:
    table, ids = node.args[:2]
    return looked_up(section, node, table, 0, ids, index)  # type: ignore[arg-type]


def indexed(section: Section, node: fx.Node, index: Indices) -> Value:
    source: Any = node.args[0]
    indices: Any = node.args[1]
    given = [place for place, each in enumerate(indices) if each is not None]
    if len(given) != 1 or kind(indices[given[0]]) != "int":
        raise NoRule(node, "it indexes several axes at once, or with a mask")
    return looked_up(section, node, source, given[0], indices[given[0]], index, wraps=True)


def index_select(section: Section, node: fx.Node, index: Indices) -> Value:
    source, dim, ids = arguments(node)[:3]
    return looked_up(section, node, source, axis(dim, rank(source)), ids, index)


RULES: dict[Any, Rule] = {
    torch.ops.llmbuild.rope.default: rope,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.embedding.default: embedding,
    aten.index.Tensor: indexed,
    aten.index_select.default: index_select,
}
