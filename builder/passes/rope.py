"""`x·cos + rotate(x)·sin => rope(x, cos, sin)`, in its half, half-width, interleaved and partial spellings.

    half         x * C + cat(-x[h:], x[:h]) * S          with C = cat(cos, cos), S = cat(sin, sin)
    interleaved  x * C + stack(-x[1::2], x[0::2]) * S    with C = repeat_interleave(cos, 2)
    backwards    x * C + cat(x[h:], -x[:h]) * S          which is the half form with -S
    half-width   cat or stack(a*cos - b*sin, b*cos + a*sin)   with a, b the halves, or the even and odd channels
    partial      cat(rope(x[:R]), x[R:])                 any of the above on the first R channels

`llmbuild::rope` is token-major, x [..., T, H, D] with cos, sin [..., T, R/2]. A head-major match is rewritten as
`transpose(rope(transpose(x)))`; `cleanup` then cancels the transposes against those around attention. The full-width
tables of the model are proven to hold each value twice, and the chain that computes them is rebuilt at half width,
once for all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.passes.edit import arg, call, describe, dtype, is_call, rank, size
from llmbuild.builder.passes.half_width import HalfWidth
from llmbuild.builder.passes.matcher import (
    Anything,
    Axis,
    Bindings,
    Call,
    Channels,
    Declined,
    OneOf,
    Value,
    add,
    match,
    mul,
    neg,
    rewrite_all,
    strip_casts,
    sub,
    value_of_dtype,
)

aten = torch.ops.aten


def cat_last(*parts: Any) -> Call:
    return Call((aten.cat.default,), (list(parts), Axis(-1)))


def interleave(*parts: Any) -> Call:
    return Call((aten.reshape.default,), (Call((aten.stack.default,), (list(parts), Axis(-1))), Anything()))


X, COS, SIN = Value("x"), Value("cos"), Value("sin")
LOW, HIGH = Channels("x", "low"), Channels("x", "high")
TURNED = OneOf((cat_last(neg(HIGH), LOW), interleave(neg(HIGH), LOW)))
TURNED_BACK = cat_last(HIGH, neg(LOW))
FULL_WIDTH = add(mul(X, COS), mul(TURNED, SIN))
BACKWARDS = add(mul(X, COS), mul(TURNED_BACK, Value("back")))
PAIR = (sub(mul(LOW, COS), mul(HIGH, SIN)), add(mul(HIGH, COS), mul(LOW, SIN)))
ROTATION = OneOf((FULL_WIDTH, BACKWARDS, cat_last(*PAIR), interleave(*PAIR)))
PATTERN = OneOf((cat_last(ROTATION, Channels("all", "rest")), ROTATION))


def rope(program: Program) -> Rewrite:
    tables = HalfWidth()

    def rewrite(program: Program, root: fx.Node, found: Bindings) -> fx.Node:
        return build(root, found, tables)

    log = rewrite_all(program, "rope", PATTERN, rewrite)
    program.graph.eliminate_dead_code()
    log.declined.extend(leftovers(program))
    return log


def build(root: fx.Node, found: Bindings, tables: HalfWidth) -> fx.Node:
    interleaved = is_interleaved(found)
    x = value_of_dtype(rotated_value(found), dtype(root))
    if "back" in found:
        found = {**found, "sin": found["back"]}
    if rank(x) < 3 or size(x) != size(root):
        raise Declined(f"{describe(x)} is not [..., heads, channels]")
    head_axis = shared_axis(found["cos"], rank(x))
    cos, sin = (half_table(found[name], found["x"], interleaved, tables) for name in ("cos", "sin"))
    if shared_axis(found["sin"], rank(x)) != head_axis:
        raise Declined(f"cos and sin are broadcast differently: {describe(found['cos'])}, {describe(found['sin'])}")
    cos, sin = (drop_axis(root, table, head_axis) for table in (cos, sin))
    if "back" in found:
        sin = call(root, aten.neg.default, sin)
    if head_axis == -2:
        return call(root, torch.ops.llmbuild.rope.default, x, cos, sin, interleaved)
    swap = (rank(x) - 3, rank(x) - 2)
    token_major = call(root, aten.transpose.int, x, *swap)
    turned = call(root, torch.ops.llmbuild.rope.default, token_major, cos, sin, interleaved)
    return call(root, aten.transpose.int, turned, *swap)


def is_interleaved(found: Bindings) -> bool:
    """Tell the layout from which channels are paired; anything but the two known pairings is declined."""
    width = size(found["x"])[-1]
    if isinstance(width, int) and width % 2 == 0:
        if found["low"] == (0, width // 2, 1) and found["high"] == (width // 2, width, 1):
            return False
        if found["low"] == (0, width, 2) and found["high"] == (1, width, 2):
            return True
    raise Declined(f"pairs channels {found['low']} with {found['high']} of {describe(found['x'])}")


def rotated_value(found: Bindings) -> fx.Node:
    """Return the value that is rotated, with its pass-through channels when the rotation is partial."""
    if "all" not in found:
        return found["x"]
    whole, (begin, end, step) = found["all"], found["rest"]
    width, total = size(found["x"])[-1], size(whole)[-1]
    taken = list(match(Channels("all", "first"), found["x"], {"all": whole, "first": (0, width, 1)}))
    if not taken or (begin, end, step) != (width, total, 1):
        raise Declined(f"rotates {describe(found['x'])} and passes channels {begin}:{end} of {describe(whole)}")
    return whole


def shared_axis(table: fx.Node, x_rank: int) -> int:
    """Return the axis, -2 or -3, along which all heads of x share one row of `table`."""
    shape = (1,) * (x_rank - rank(table)) + size(table)
    if shape[-2] == 1 and shape[-3] != 1:
        return -2
    if shape[-3] == 1:
        return -3
    raise Declined(f"the table {describe(table)} differs from head to head")


def half_table(table: fx.Node, x: fx.Node, interleaved: bool, tables: HalfWidth) -> fx.Node:
    width, full = size(table)[-1], size(x)[-1]
    assert isinstance(full, int)
    if width == full // 2:
        return table
    if width != full:
        raise Declined(f"the table {describe(table)} does not fit {full} channels")
    return tables.of(table, interleaved)


def drop_axis(root: fx.Node, table: fx.Node, head_axis: int) -> fx.Node:
    """Return `table` without the axis of size 1 that stands for the heads."""
    if rank(table) < -head_axis:
        return table
    return call(root, aten.squeeze.dim, table, head_axis)


def leftovers(program: Program) -> list[str]:
    """Rotations that no rule recognised: a half turned with a sign, still in the graph."""
    found = []
    for node in program.graph.nodes:
        if is_call(node, aten.cat.default, aten.stack.default):
            parts: Any = arg(node, 0)
            if len(parts) == 2 and is_call(strip_casts(parts[0]), aten.neg.default):
                turned = f"{describe(node)} turns channels, but no rotation was recognised"
                found.append(f"{node.name}: {turned} [{source_line(node)}]")
    return found
