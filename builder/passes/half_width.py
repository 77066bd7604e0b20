"""Rebuild a table that holds each value twice along its last axis at half the width, with the proof.

half layout          cat(f, f)                                    => f
interleaved layout   repeat_interleave(f, 2), stack(f, f)         => f
any                  g(table), g elementwise or on other axes     => g(half of table)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arg, arguments, axis, call, describe, is_call, is_tensor, rank, size
from llmbuild.builder.passes.matcher import Declined, is_axis

aten = torch.ops.aten

# Ops that do not touch the last axis when their axis arguments, at this position, do not name it.
OTHER_AXES: dict[Any, tuple[int, ...]] = {
    aten.unsqueeze.default: (1,),
    aten.squeeze.dim: (1,),
    aten.select.int: (1,),
    aten.transpose.int: (1, 2),
    aten.slice.Tensor: (1,),
}


class HalfWidth:
    """Halved tables, made once for each table and layout however many layers use it."""

    def __init__(self) -> None:
        self.made: dict[tuple[fx.Node, bool], fx.Node] = {}

    def of(self, table: fx.Node, interleaved: bool) -> fx.Node:
        """Return a node with every second distinct value of `table`.

        Raises:
            Declined: `table` is not proven to hold each value twice in this layout.
        """
        key = (table, interleaved)
        if key not in self.made:
            self.made[key] = self.build(table, interleaved)
        return self.made[key]

    def build(self, table: fx.Node, interleaved: bool) -> fx.Node:
        width = size(table)[-1]
        doubled = doubled_value(table, interleaved)
        if doubled is not None:
            return doubled
        if torch.Tag.pointwise in getattr(table.target, "tags", ()) or is_call(table, aten.to.dtype):
            inner = {arg: self.operand(arg, interleaved) for arg in table.all_input_nodes if is_tensor(arg)}
        elif table.target in OTHER_AXES and self.spares_last(table):
            inner = {arg(table, 0): self.of(arg(table, 0), interleaved)}
        elif is_call(table, aten.expand.default) and size(arg(table, 0))[-1] == width:
            half = self.of(arg(table, 0), interleaved)
            return call(table, aten.expand.default, half, [*arg(table, 1)[:-1], -1])
        else:
            raise Declined(f"{describe(table)} is not proven to hold each value twice")
        args, kwargs = fx.node.map_arg((table.args, dict(table.kwargs)), lambda arg: inner.get(arg, arg))
        return call(table, table.target, *args, **kwargs)

    def operand(self, arg: fx.Node, interleaved: bool) -> fx.Node:
        """An elementwise operand is halved too, unless it has no axis to halve."""
        return arg if rank(arg) == 0 or size(arg)[-1] == 1 else self.of(arg, interleaved)

    def spares_last(self, table: fx.Node) -> bool:
        of_rank = rank(table) if is_call(table, aten.unsqueeze.default) else rank(arg(table, 0))
        dims = [arguments(table)[position] for position in OTHER_AXES[table.target]]
        return all(axis(dim, of_rank) != of_rank - 1 for dim in dims)


def doubled_value(table: fx.Node, interleaved: bool) -> fx.Node | None:
    """Return f when `table` is f written twice in the layout asked for."""
    if not interleaved:
        if is_call(table, aten.cat.default) and is_axis(arguments(table)[1], -1, rank(table)):
            parts: Any = arg(table, 0)
            return parts[0] if len(parts) == 2 and parts[0] is parts[1] else None
        return None
    if is_call(table, aten.repeat_interleave.self_int):
        source, repeats, dim = arguments(table)[:3]
        return source if repeats == 2 and dim is not None and is_axis(dim, -1, rank(table)) else None
    if is_call(table, aten.reshape.default) and is_call(arg(table, 0), aten.stack.default):
        stack: Any = arg(table, 0)
        parts, dim = arguments(stack)[:2]
        twice = len(parts) == 2 and parts[0] is parts[1] and is_axis(dim, -1, rank(stack))
        return parts[0] if twice and size(table)[:-1] == size(parts[0])[:-1] else None
    return None
