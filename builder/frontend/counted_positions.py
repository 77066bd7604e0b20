"""`arange(T) => position_ids`: positions that a model counts itself.

Without a cache a model is given one sequence from its first token on, so the number that it counts for a row is that
row's position. Packed rows have theirs in `position_ids`. Whatever the model then computes from it token by token stays
right; a mask made of it would mix tokens, which `contract.check_tokens_stay_apart` refuses.
"""

from __future__ import annotations

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, call, dtype, is_call, replace

aten = torch.ops.aten
# op -> places of start and step among its arguments
COUNTERS = {
    aten.arange.default: (None, None),
    aten.arange.start: (0, None),
    aten.arange.start_step: (0, 2),
}


def use_position_ids(graph: fx.Graph) -> int:
    """Replace every count of all tokens, in place. Returns how many there were."""
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    tokens = inputs["input_ids"].meta["val"].shape[0]
    count = 0
    for node in [node for node in graph.nodes if is_call(node, *COUNTERS)]:
        if counts_tokens(node, tokens):
            replace(node, call(node, aten.to.dtype, inputs["position_ids"], dtype(node)))
            count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def counts_tokens(node: fx.Node, tokens: torch.SymInt) -> bool:
    """Whether a call of arange gives 0, 1, .., T - 1."""
    start, step = (
        default if at is None else arguments(node)[at] for at, default in zip(place(node), (0, 1), strict=True)
    )
    length = node.meta["val"].shape[0]
    whole = isinstance(length, torch.SymInt) and length.node.expr == tokens.node.expr
    return whole and isinstance(start, int) and start == 0 and isinstance(step, int) and step == 1


def place(node: fx.Node) -> tuple[int | None, int | None]:
    return COUNTERS[node.target]  # type: ignore[index]
