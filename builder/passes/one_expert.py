"""`Σ_e bmm(f(bmm(s·x, up)), down)[e]`, all experts for all tokens where all but one have s = 0 => moe_experts.

Llama 4 sends a token's input, weighted, to every expert, with weight 0 to all that its router did not choose; an expert
without biases makes 0 of 0. With one choice a token, that is one expert of the weighted input.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.passes.edit import arg, arguments, call, dtype, is_call, rank, replace, size
from llmbuild.builder.passes.matcher import strip_casts

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
VIEWS = (aten.reshape.default, aten.view.default)
ACTIVATIONS = {aten.silu.default: "silu", aten.relu.default: "relu"}


class NoMatch(Exception):
    """Why a sum of products is not that of experts."""


def one_expert(program: Program) -> Rewrite:
    log = Rewrite("one_expert", 0)
    for node in list(program.graph.nodes):
        if (
            is_call(node, aten.sum.dim_IntList)
            and list(arg(node, 1)) == [0]
            and is_call(plain(arg(node, 0)), aten.bmm.default)
        ):
            try:
                replace(node, experts(program, node))
                log.count += 1
            except NoMatch as reason:
                log.declined.append(f"{node.name}: {reason} [{source_line(node)}]")
    if log.count:
        program.graph.eliminate_dead_code()
    return log


def experts(program: Program, node: fx.Node) -> fx.Node:
    """Return the op that gives what the sum `node` gives, put before it."""
    down = plain(arg(node, 0))
    hidden, down_weight = down.args
    activation, up = gated(plain(hidden))
    folded, up_weight = up.args
    for weight in (up_weight, down_weight):
        if program.weight_of(weight) is None:
            raise NoMatch(f"{weight} is no weight")
    x, scores = weighted(plain(folded))
    ids, chosen = router(scores)
    if rank(x) != 2 or size(ids)[1] != 1:
        raise NoMatch(f"{size(ids)[1]} experts for each token, whose inputs differ")
    if dtype(chosen) != dtype(x):
        chosen = call(node, aten.to.dtype, chosen, dtype(x))
    up_rows, down_rows = (call(node, llmbuild.expert_rows.default, w, True, False) for w in (up_weight, down_weight))
    result = call(
        node,
        llmbuild.moe_experts.default,
        call(node, aten.mul.Tensor, x, chosen),
        ids,
        call(node, aten.ones_like.default, chosen),
        up_rows,
        down_rows,
        None,
        None,
        activation,
    )
    if size(result) != size(node) or dtype(result) != dtype(node):
        raise NoMatch(f"it gives {list(size(node))} {dtype(node)}")
    return result


def plain(node: Any) -> Any:
    """What a chain of reshapes is made of."""
    while is_call(node, *VIEWS):
        node = arg(node, 0)
    return node


def gated(node: Any) -> tuple[str, fx.Node]:
    """Return the activation and the product of `activation(first half) * second half`."""
    if not is_call(node, aten.mul.Tensor):
        raise NoMatch(f"{node} is no gated activation")
    for one, other in (node.args, node.args[::-1]):
        if not is_call(one, *ACTIVATIONS):
            continue
        gate, up = arg(one, 0), other
        halves = [each for each in (gate, up) if is_call(each, operator.getitem)]
        if len(halves) == 2 and arg(gate, 0) is arg(up, 0) and (arg(gate, 1), arg(up, 1)) == (0, 1):
            product = plain(arg(arg(gate, 0), 0))
            if is_call(product, aten.bmm.default) and size(gate) == size(up):
                return ACTIVATIONS[one.target], product
    raise NoMatch(f"{node} is no gated activation of a product")


def weighted(node: Any) -> tuple[fx.Node, fx.Node]:
    """Return x and the scores [T, E] of `repeat(x, E) * scores.T`."""
    if is_call(node, aten.mul.Tensor):
        for one, other in (node.args, node.args[::-1]):
            turned = plain(other)
            if is_call(one, aten.repeat.default) and is_call(turned, aten.transpose.int):
                scores = arg(turned, 0)
                swaps = {arg(turned, 1) % 2, arg(turned, 2) % 2} == {0, 1}
                if swaps and rank(scores) == 2 and list(arg(one, 1)) == [size(scores)[1], 1]:
                    return arg(one, 0), scores
    raise NoMatch(f"{node} is no input weighted for each expert")


def router(scores: Any) -> tuple[fx.Node, fx.Node]:
    """Return ids [T, K] and weights [T, K], put after the choice, of scores [T, E] that are 0 where not chosen."""
    sigmoid = strip_casts(scores)
    if is_call(sigmoid, aten.sigmoid.default):
        spread = strip_casts(arg(sigmoid, 0))
        if is_call(spread, aten.scatter.src) and arg(spread, 1) in (1, -1) and is_lowest(arg(spread, 0)):
            ids, values = arg(spread, 2), arg(spread, 3)
            return ids, call(sigmoid, aten.sigmoid.default, values)
    raise NoMatch(f"{scores} are no scores of a chosen expert")


def is_lowest(node: Any) -> bool:
    """Whether a tensor is -inf everywhere."""
    made = is_call(node, aten.full_like.default, aten.full.default)
    return made and arguments(node)[1] == -math.inf
