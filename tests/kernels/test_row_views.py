"""Views only transform indices: the element that is read is the one that torch puts there."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from llmbuild.builder.passes.edit import rank, size
from llmbuild.builder.targets.cuda.index import Index, Var, index_of
from llmbuild.builder.targets.cuda.views import NoRule, base, is_view, step
from support.simulated import Tracer

aten = torch.ops.aten
ROWS = 3


def addresses(node: fx.Node, source: fx.Node) -> np.ndarray:
    """For each element of `node`, of ROWS rows, where in a dense `source` it lies, as the index maps say."""
    dims = [dim if isinstance(dim, int) else int(dim.subs({symbol_of(dim): ROWS})) for dim in size(node)]
    names = [f"i{place}" for place in range(len(dims))]
    index = tuple(
        index_of(Var(name, dim if isinstance(dim, int) else None)) for name, dim in zip(names, size(node), strict=True)
    )
    while node is not source:
        found = step(node, index)
        assert found is not None
        node, index = found
    flat, stride = Index(), 1
    for each, dim in reversed(list(zip(index, size(source), strict=True))):
        flat += each * stride
        stride *= dim if isinstance(dim, int) else 1  # rows come first
    grid = np.meshgrid(*(np.arange(dim) for dim in dims), indexing="ij")
    return np.broadcast_to(np.asarray(eval(flat.text, {}, dict(zip(names, grid, strict=True)))), dims)


def symbol_of(dim: Any) -> Any:
    return next(iter(dim.free_symbols))


def check(trace: Tracer, node: fx.Node) -> None:
    inner = [int(dim) for dim in size(trace.input)[1:]]
    x = torch.arange(ROWS * int(np.prod(inner))).reshape(ROWS, *inner)
    np.testing.assert_array_equal(addresses(node, trace.input), trace.run(node, x).numpy())


SINGLE = {
    "reshape heads": lambda t, x: t.call(aten.reshape.default, x, [-1, 2, 12]),
    "reshape across": lambda t, x: t.call(aten.reshape.default, x, [-1, 3, 8]),
    "reshape rows into one more axis": lambda t, x: t.call(aten.reshape.default, x, [-1, 6]),
    "reshape with ones": lambda t, x: t.call(aten.reshape.default, x, [1, -1, 1, 24, 1]),
    "transpose": lambda t, x: t.call(aten.transpose.int, x, -1, -2),
    "transpose rows": lambda t, x: t.call(aten.transpose.int, x, 0, 1),
    "permute": lambda t, x: t.call(aten.permute.default, x, [2, 0, 1]),
    "unsqueeze": lambda t, x: t.call(aten.unsqueeze.default, x, -2),
    "squeeze": lambda t, x: t.call(aten.squeeze.dim, t.call(aten.unsqueeze.default, x, 1), 1),
    "select": lambda t, x: t.call(aten.select.int, x, 1, -1),
    "slice": lambda t, x: t.call(aten.slice.Tensor, x, 2, 1, 5),
    "slice with a step": lambda t, x: t.call(aten.slice.Tensor, x, 2, 1, 9223372036854775807, 2),
    "slice from the end": lambda t, x: t.call(aten.slice.Tensor, x, -1, -2, None),
    "split": lambda t, x: t.call(operator.getitem, t.call(aten.split_with_sizes.default, x, [1, 3, 2], -1), 1),
    "chunk": lambda t, x: t.call(operator.getitem, t.call(aten.chunk.default, x, 2, 1), 1),
    "unbind": lambda t, x: t.call(operator.getitem, t.call(aten.unbind.int, x, 1), 3),
    "expand": lambda t, x: t.call(aten.expand.default, t.call(aten.unsqueeze.default, x, 2), [-1, 4, 5, 6]),
    "repeat each": lambda t, x: t.call(aten.repeat_interleave.self_int, x, 3, 1),
    "repeat": lambda t, x: t.call(aten.repeat.default, x, [1, 2, 3]),
    "flip": lambda t, x: t.call(aten.flip.default, x, [1, 2]),
}


@pytest.mark.parametrize("name", SINGLE)
def test_each_view_reads_what_torch_puts_there(name: str) -> None:
    trace = Tracer(4, 6)
    node = SINGLE[name](trace, trace.input)
    check(trace, node)
    assert is_view(node) and base(node) is trace.input


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tracer, fx.Node]:
    """Up to five views on top of each other, on [T, 4, 6]."""
    trace = Tracer(4, 6)
    node = trace.input
    for _ in range(draw(st.integers(1, 5))):
        node = draw(st.sampled_from(MAKERS))(draw, trace, node)
    return trace, node


def fixed_axis(draw: st.DrawFn, node: fx.Node) -> int | None:
    axes = [place for place, dim in enumerate(size(node)) if isinstance(dim, int)]
    return draw(st.sampled_from(axes)) if axes else None


def any_reshape(draw: st.DrawFn, trace: Tracer, node: fx.Node) -> fx.Node:
    dims = list(size(node))
    if isinstance(dims[0], int):  # rows are elsewhere
        return node
    inner = int(np.prod([int(dim) for dim in dims[1:]]))
    first = draw(st.sampled_from([each for each in range(1, inner + 1) if inner % each == 0]))
    shape = [[-1, first, inner // first], [-1, inner], [1, -1, inner // first, first]]
    return trace.call(aten.reshape.default, node, draw(st.sampled_from(shape)))


def any_transpose(draw: st.DrawFn, trace: Tracer, node: fx.Node) -> fx.Node:
    return trace.call(aten.permute.default, node, draw(st.permutations(range(rank(node)))))


def any_slice(draw: st.DrawFn, trace: Tracer, node: fx.Node) -> fx.Node:
    place = fixed_axis(draw, node)
    if place is None:
        return node
    width = int(size(node)[place])  # type: ignore[arg-type]
    begin = draw(st.integers(0, width - 1))
    return trace.call(
        aten.slice.Tensor, node, place, begin, draw(st.integers(begin + 1, width)), draw(st.integers(1, 2))
    )


def any_select(draw: st.DrawFn, trace: Tracer, node: fx.Node) -> fx.Node:
    place = fixed_axis(draw, node)
    if place is None or rank(node) < 3:
        return node
    return trace.call(aten.select.int, node, place, draw(st.integers(0, int(size(node)[place]) - 1)))  # type: ignore[arg-type]


def any_flip(draw: st.DrawFn, trace: Tracer, node: fx.Node) -> fx.Node:
    place = fixed_axis(draw, node)
    return node if place is None else trace.call(aten.flip.default, node, [place])


def any_repeat(draw: st.DrawFn, trace: Tracer, node: fx.Node) -> fx.Node:
    place = fixed_axis(draw, node)
    if place is None or np.prod([dim for dim in size(node) if isinstance(dim, int)]) > 60:
        return node
    return trace.call(aten.repeat_interleave.self_int, node, 2, place)


def any_new_axis(draw: st.DrawFn, trace: Tracer, node: fx.Node) -> fx.Node:
    return trace.call(aten.unsqueeze.default, node, draw(st.integers(0, rank(node))))


MAKERS = (any_reshape, any_reshape, any_transpose, any_slice, any_select, any_flip, any_repeat, any_new_axis)


@settings(max_examples=25, deadline=None)
@given(chains())
def test_chains_of_views_read_what_torch_puts_there(chain: tuple[Tracer, fx.Node]) -> None:
    trace, node = chain
    try:
        check(trace, node)
    except NoRule as refused:  # such as rows folded into the middle of an axis: refused by name, never read wrongly
        assert "row" in refused.reason


def test_views_of_rows_themselves_are_refused_by_name() -> None:
    trace = Tracer(4, 6)
    index = (Index(),) * 3
    flipped = trace.call(aten.flip.default, trace.input, [0])
    with pytest.raises(NoRule, match="flip_default: it reverses rows"):
        step(flipped, index)
    behind = trace.call(aten.reshape.default, trace.call(aten.transpose.int, trace.input, 0, 1), [-1, 6])
    with pytest.raises(NoRule, match="rows become an inner axis"):
        step(behind, index[:2])
