"""`f(unsqueeze(x, 0)) => unsqueeze(f(x), 0)` until the batch axis of 1 from tracing meets its `select` and is gone.

Tokens are packed, [T, ...]; the model was traced on `[1, T, ...]`. The axis is dropped only through ops known to be
row-wise over it (`rows.py`); at any other op it is put back, so the graph stays right and the reason is reported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.passes.edit import arg, axis, call, describe, is_call, is_tensor, rank, replace, size
from llmbuild.builder.passes.rows import result_size, row_carriers

aten = torch.ops.aten

AXIS_ARGUMENTS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"})
SIZE_ARGUMENTS = frozenset({"size", "shape"})


def drop_batch_axis(program: Program) -> Rewrite:
    log = Rewrite("drop_batch_axis", 0)
    flat: dict[fx.Node, fx.Node] = {}  # [1, ...] node -> the node that computes it without the axis
    for node in list(program.graph.nodes):
        dropped = without_axis(node, flat)
        if dropped is not None:
            flat[node] = dropped
    for node in reversed(list(flat)):
        for user in node.users:
            # `cleanup` joins a reshape that merges the axis with the `unsqueeze` put back before it.
            passes = removes_axis(user) or is_call(user, aten.reshape.default)
            if user not in flat and user.op == "call_function" and not passes:
                log.declined.append(f"{user.name}: axis 0 reaches {describe(user)} [{source_line(user)}]")
        if is_tensor(node):
            log.count += 1
            if node.users and not is_call(node, aten.unsqueeze.default):
                replace(node, call(node, aten.unsqueeze.default, flat[node], 0))
    for node in list(program.graph.nodes):
        if removes_axis(node) and is_call(arg(node, 0), aten.unsqueeze.default) and arg(arg(node, 0), 1) == 0:
            replace(node, arg(arg(node, 0), 0))
    program.graph.eliminate_dead_code()
    return log


def removes_axis(node: fx.Node) -> bool:
    """Whether `node` takes the only row of axis 0."""
    if is_call(node, aten.select.int):
        return node.args[1:] == (0, 0)
    return is_call(node, aten.squeeze.dim) and arg(node, 1) == 0


def takes_stream(node: fx.Node) -> bool:
    """Whether `node` takes one of several tensors [1, ..] that are stacked as [n, 1, ..]."""
    return is_call(node, aten.select.int) and axis(arg(node, 1), rank(node) + 1) == 0 and size(arg(node, 0))[0] != 1


def without_axis(node: fx.Node, flat: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Return a new node that computes `node` without its leading axis of 1, or None."""
    if node.op != "call_function" or "val" not in node.meta or not has_axis(node):
        return None
    if is_call(node, aten.unsqueeze.default) and axis(arg(node, 1), rank(node)) == 0:
        return arg(node, 0)
    if is_call(node, aten.reshape.default) and (arg(node, 0) in flat or size(arg(node, 0))[0] != 1):
        source: Any = arg(node, 0)
        return call(node, aten.reshape.default, flat.get(source, source), list(arg(node, 1)[1:]))
    if takes_stream(node):
        inside = call(node, aten.select.int, arg(node, 0), 1, 0)
        return call(node, aten.select.int, inside, 0, arg(node, 2))
    carriers = row_carriers(node)
    if carriers is None or not any(carrier in flat for carrier in carriers):
        return None
    inner: dict[fx.Node, fx.Node] = {}
    for carrier in carriers:
        inner[carrier] = flat[carrier] if carrier in flat else call(node, aten.select.int, carrier, 0, 0)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: inner.get(arg, arg))
    if isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
        args = tuple(shifted(name, value) for name, value in zip(names, args, strict=False))
        kwargs = {name: shifted(name, value) for name, value in kwargs.items()}
    new = call(node, node.target, *args, **kwargs)
    if result_size(new) != result_size(node)[1:]:
        raise AssertionError(f"{node.name}: {result_size(new)} is not {result_size(node)} without its first axis")
    return new


def has_axis(node: fx.Node) -> bool:
    value = node.meta["val"]
    first = value if isinstance(value, torch.Tensor) else value[0] if isinstance(value, (list, tuple)) else None
    return isinstance(first, torch.Tensor) and first.ndim > 0 and result_size(node)[0] == 1


def shifted(name: str, value: Any) -> Any:
    """Return an op argument as it reads for tensors without their first axis."""
    if name in SIZE_ARGUMENTS and isinstance(value, (list, tuple)):
        return list(value[1:])
    if name == "indices" and isinstance(value, (list, tuple)) and value[0] is None:
        return list(value[1:])
    if name in AXIS_ARGUMENTS:
        if isinstance(value, (list, tuple)):
            moves_axes = value[0] == 0  # permute lists every axis, reductions only those they reduce
            return [dim - 1 if dim >= 0 else dim for dim in value[moves_axes:]]
        return value - 1 if value >= 0 else value
    return value
