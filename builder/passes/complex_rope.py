"""`view_as_real(view_as_complex(x pairs) · r·e^(iφ)) => (a·c - b·s, b·c + a·s)` with c = r·cos φ, s = r·sin φ.

DeepSeek V2 and Llama 4 rotate channels as complex numbers. Spelled with real ones this is the interleaved rotation that
`rope` knows, and no target has to compute with complex numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.passes.edit import arg, arguments, axis, call, describe, dtype, is_call, rank, replace, size
from llmbuild.builder.passes.matcher import Declined

aten = torch.ops.aten

# Ops on a table of complex numbers that may as well be done on its real and imaginary parts.
SAME = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default)
LAYOUT = (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor)


def complex_rope(program: Program) -> Rewrite:
    log = Rewrite("complex_rope", 0)
    for node in list(program.graph.nodes):
        if not is_call(node, aten.view_as_real.default):
            continue
        try:
            new = spelled_out(node)
        except Declined as reason:
            log.declined.append(f"{node.name}: {reason} [{source_line(node)}]")
            continue
        replace(node, new)
        log.count += 1
    program.graph.eliminate_dead_code()
    return log


def spelled_out(node: fx.Node) -> fx.Node:
    product: Any = arg(node, 0)
    if not is_call(product, aten.mul.Tensor):
        raise Declined(f"complex numbers come from {describe(product)}, not from a product")
    left, right = product.args
    if not is_call(left, aten.view_as_complex.default):
        left, right = right, left
    if not is_call(left, aten.view_as_complex.default):
        raise Declined(f"neither factor is a view of channels: {describe(left)}, {describe(right)}")
    pairs: Any = arg(left, 0)
    a, b = channels_of(node, pairs)
    cos, sin = (part(node, right, trig) for trig in (aten.cos.default, aten.sin.default))
    real = call(node, aten.sub.Tensor, call(node, aten.mul.Tensor, a, cos), call(node, aten.mul.Tensor, b, sin))
    imaginary = call(node, aten.add.Tensor, call(node, aten.mul.Tensor, b, cos), call(node, aten.mul.Tensor, a, sin))
    return call(node, aten.stack.default, [real, imaginary], -1)


def channels_of(before: fx.Node, pairs: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Even and odd channels of x, from x's pairs [.., D/2, 2]."""
    last = rank(pairs) - 2
    x = call(before, aten.flatten.using_ints, pairs, last, last + 1)
    even, odd = (call(before, aten.slice.Tensor, x, last, begin, size(x)[-1], 2) for begin in (0, 1))
    return even, odd


def part(before: fx.Node, table: Any, trig: Any) -> fx.Node:
    """r·cos φ or r·sin φ of a complex table that is made by polar, with what is done to its layout."""
    if is_call(table, aten.polar.default):
        radius, angle = table.args
        return call(before, aten.mul.Tensor, call(before, trig, angle), radius)
    if is_call(table, aten.mul.Tensor) and not isinstance(table.args[1], fx.Node):
        return call(before, aten.mul.Tensor, part(before, table.args[0], trig), table.args[1])
    if is_call(table, aten.mul.Tensor) and not table.args[1].meta["val"].is_complex():
        return call(before, aten.mul.Tensor, part(before, table.args[0], trig), table.args[1])
    if is_call(table, *SAME) and dtype(table) == dtype(table.args[0]):
        return part(before, table.args[0], trig)
    if is_call(table, *LAYOUT):
        if is_call(table, aten.slice.Tensor) and axis(arguments(table)[1], rank(table)) == rank(table) - 1:
            raise Declined(f"takes a part of the frequencies: {describe(table)}")
        return call(before, table.target, part(before, table.args[0], trig), *table.args[1:], **table.kwargs)
    raise Declined(f"the complex factor is {describe(table)}, not made by polar")
