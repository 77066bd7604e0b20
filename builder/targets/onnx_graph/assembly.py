"""Tensors that a model makes empty and then fills slice by slice: each slice becomes a Concat."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, axis, dtype, rank, size
from llmbuild.builder.targets.onnx_graph.emitter import Emitter, numpy_dtype
from llmbuild.builder.targets.onnx_graph.rule import INT64_MAX, Rule, cast

aten = torch.ops.aten


def new_empty(e: Emitter, node: fx.Node) -> str:
    """Zeros: what is never filled must at least be the same every time. The token axis is read from the source."""
    source: Any = node.args[0]
    of_source = e.op("Shape", e.tensor(source))
    dims = [
        e.ints(dim) if isinstance(dim, int) else e.op("Gather", of_source, e.ints(size(source).index(dim)))
        for dim in size(node)
    ]
    zero = np.zeros(1, numpy_dtype(dtype(node)))
    return e.op("ConstantOfShape", e.op("Concat", *dims, axis=0), value=e.attribute_tensor(zero))


def known_axes(node: fx.Node) -> str | None:
    source: Any = node.args[0]
    unknown = [dim for dim in size(node) if not isinstance(dim, int) and dim not in size(source)]
    return f"its axis {unknown[0]} is not one of its source's" if unknown else None


def copy(e: Emitter, node: fx.Node) -> str:
    """copy(destination, source) is the source in the destination's dtype."""
    source: Any = node.args[1]
    return cast(e, e.tensor(source), dtype(source), dtype(node))


def same_shape(node: fx.Node) -> str | None:
    into, source = node.args[:2]
    same = size(into) == size(source)  # type: ignore[arg-type]
    return None if same else f"it broadcasts {size(source)} to {size(into)}"  # type: ignore[arg-type]


def slice_scatter(e: Emitter, node: fx.Node) -> str:
    """base[.., start:end, ..] = source, as base[..:start] | source | base[end:..]"""
    base, source, dim, start, end, step = arguments(node)
    where = axis(dim, rank(base))
    width = int(size(base)[where])
    start, end = start or 0, width if end is None else min(end, width)
    if step != 1:
        return overwrite(e, e.tensor(base), e.tensor(source), range(start, end, step), where, width)
    whole, parts = e.tensor(base), [e.tensor(source)]
    if start > 0:
        parts.insert(0, e.op("Slice", whole, e.ints(0), e.ints(start), e.ints(where)))
    if end < width:
        parts.append(e.op("Slice", whole, e.ints(end), e.ints(INT64_MAX), e.ints(where)))
    return parts[0] if len(parts) == 1 else e.op("Concat", *parts, axis=where)


def overwrite(e: Emitter, base: str, source: str, places: range, where: int, width: int) -> str:
    """base with `places` of an axis taken from source, in order: both below each other, then picked by number."""
    rows = list(range(width))
    for number, place in enumerate(places):
        rows[place] = width + number
    return e.op("Gather", e.op("Concat", base, source, axis=where), e.ints(*rows), axis=where)


def select_scatter(e: Emitter, node: fx.Node) -> str:
    """base[.., index, ..] = source"""
    base, source, dim, index = arguments(node)
    where = axis(dim, rank(base))
    width = int(size(base)[where])
    row = e.op("Unsqueeze", e.tensor(source), e.ints(where))
    index = axis(index, width)
    return overwrite(e, e.tensor(base), row, range(index, index + 1), where, width)


def fixed_axis(node: fx.Node) -> str | None:
    base, _, dim, _ = arguments(node)
    return None if isinstance(size(base)[axis(dim, rank(base))], int) else "it fills one of the tokens"


def fixed_slice(node: fx.Node) -> str | None:
    base, _, dim, start, end, step = arguments(node)
    if not isinstance(size(base)[axis(dim, rank(base))], int):
        return "it fills a slice of the tokens"
    if any(bound is not None and not isinstance(bound, int) for bound in (start, end, step)):
        return f"its bounds {start}:{end}:{step} are not constants"
    return None if (start or 0) >= 0 and (end is None or end >= 0) else f"its bounds {start}:{end} count from the end"


RULES: dict[Any, Rule] = {
    aten.new_empty.default: Rule(new_empty, known_axes),
    aten.copy.default: Rule(copy, same_shape),
    aten.slice_scatter.default: Rule(slice_scatter, fixed_slice),
    aten.select_scatter.default: Rule(select_scatter, fixed_axis),
}
