"""`gather(f(x), rows) => f(gather(x, rows))`: after the last attention, compute only the rows that are asked for.

Moves the gather of `logits_indices` up through row-wise ops (`rows.py`) as long as nothing else needs all rows: before
`lm_head` in any case, and in most models before the last layer's MLP and output projection.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.passes.edit import arg, call, describe, erase_unused, getitems, is_call, replace, size
from llmbuild.builder.passes.rows import result_size, row_carriers

aten = torch.ops.aten
LINEARS = (aten.linear.default, torch.ops.llmbuild.linear_blockwise.default)


def gather_rows(program: Program) -> Rewrite:
    log = Rewrite("gather_rows", 0)
    rows = program.placeholder("logits_indices")
    moved = True
    while moved:
        moved = False
        for gather in reversed([user for user in rows.users if is_gather(user, rows)]):
            if gather in rows.users and move_up(gather, rows):
                log.count += 1
                moved = True
    log.declined.extend(unmoved(program, rows))
    return log


def is_gather(node: fx.Node, rows: fx.Node) -> bool:
    return is_call(node, aten.index.Tensor) and list(arg(node, 1)) == [rows]


def move_up(gather: fx.Node, rows: fx.Node) -> bool:
    """Compute the gathered value from gathered operands, if all its uses are gathers. Returns whether it was."""
    source: Any = arg(gather, 0)
    producer: fx.Node = arg(source, 0) if is_call(source, operator.getitem) else source
    for unread in [result for result in getitems(producer).values() if not result.users]:
        erase_unused(unread)
    results = list(getitems(producer).values()) or [producer]
    if any(not is_gather(user, rows) for result in results for user in result.users):
        return False
    carriers = row_carriers(producer)
    if carriers is None or not keeps_rows_free(producer):
        return False
    inner = {carrier: call(producer, aten.index.Tensor, carrier, [rows]) for carrier in carriers}
    args, kwargs = fx.node.map_arg((producer.args, dict(producer.kwargs)), lambda arg: inner.get(arg, arg))
    new = call(producer, producer.target, *args, **kwargs)
    if result_size(new) != (size(rows)[0], *result_size(producer)[1:]):
        raise AssertionError(f"{producer.name}: rows of {result_size(producer)} became {result_size(new)}")
    for result in results:
        piece = new if result is producer else call(producer, operator.getitem, new, arg(result, 1))
        for user in list(result.users):
            replace(user, piece)
    return True


def keeps_rows_free(producer: fx.Node) -> bool:
    """Whether the number of rows is left open in the producer's own arguments (-1 in a reshape or expand)."""
    if is_call(producer, aten.reshape.default, aten.expand.default):
        return arg(producer, 1)[0] == -1
    return True


def unmoved(program: Program, rows: fx.Node) -> list[str]:
    """Name the linear that makes the logits when it runs on all tokens."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    node: Any = arg(output, 0)
    while not is_call(node, *LINEARS):
        carriers = row_carriers(node)
        if not carriers:
            return [f"{node.name}: the logits come from {describe(node)}, which is not row-wise [{source_line(node)}]"]
        node = carriers[0] if not is_gather(node, rows) else arg(node, 0)
    if size(node)[0] == size(rows)[0]:
        return []
    return [f"{node.name}: logits are computed for all tokens, {describe(node)} [{source_line(node)}]"]
