"""`x@aᵀ, x@bᵀ, … => split(x@[a; b; …]ᵀ)`: sibling linears of one value (q/k/v, gate/up) become one.

Weights are merged as `Concat` expressions: no second copy. Siblings that are stored differently (dtype, block format)
stay apart; those that agree are merged among themselves. Where only some have a bias, zeros stand in: adding 0 is
exact.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Concat, Constant, Program, Rewrite, WeightExpr, source_line
from llmbuild.builder.passes.edit import arg, arguments, call, describe, is_call, replace, size
from llmbuild.builder.passes.float8_products import held_alike
from llmbuild.builder.passes.fold_weights import new_weight
from llmbuild.quantization.float8 import Float8Weight

aten = torch.ops.aten


def merge_linears(program: Program) -> Rewrite:
    log = Rewrite("merge_linears", 0)
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    for x in list(program.graph.nodes):
        siblings = [user for user in x.users if is_call(user, aten.linear.default) and arg(user, 0) is x]
        if len(siblings) < 2:
            continue
        siblings.sort(key=order.__getitem__)
        groups: dict[str, list[fx.Node]] = {}
        for node in siblings:
            reason = why_alone(program, node)
            if reason is None:
                groups.setdefault(storage(program.weights[weight_of(node).name]), []).append(node)
            else:
                log.declined.append(f"{node.name}: {reason} [{source_line(node)}]")
        if len(groups) > 1:
            listed = "; ".join(f"{key}: {', '.join(node.name for node in group)}" for key, group in groups.items())
            log.declined.append(f"{x.name}: its linears are stored differently: {listed} [{source_line(siblings[0])}]")
        for group in groups.values():
            if len(group) > 1:
                merge(program, x, group)
                log.count += 1
    program.drop_unused_weights()
    return log


def weight_of(node: fx.Node) -> fx.Node:
    weight = arg(node, 1)
    assert isinstance(weight, fx.Node)
    return weight


def bias_of(node: fx.Node) -> Any:
    return arguments(node)[2]


def why_alone(program: Program, node: fx.Node) -> str | None:
    """Return why a linear cannot be merged with any other, or None."""
    weight, bias = weight_of(node), bias_of(node)
    if program.weight_of(weight) is None:
        return f"{describe(weight)} is not a weight"
    if len(weight.users) > 1:
        return f"{weight.name} is used elsewhere too; merging would store it twice"
    if bias is not None and program.weight_of(bias) is None:
        return f"its bias {describe(bias)} is not a weight"
    return None


def storage(expr: WeightExpr) -> str:
    """Return how a weight is stored; only weights that agree in it can share a matrix."""
    if isinstance(expr, Float8Weight):
        return held_alike(expr)
    block = expr.block_format
    if block is None:
        return str(expr.dtype).removeprefix("torch.")
    kind = "asymmetric" if block.has_offset else f"zero {block.zero}"
    return f"{block.source} ({block.bits} bits, blocks of {block.block_size}, {kind})"


def merge(program: Program, x: fx.Node, group: list[fx.Node]) -> None:
    weights = [weight_of(node) for node in group]
    name = joined_name(weights)
    merged = new_weight(program, name, Concat(tuple(program.weights[w.name] for w in weights)))
    operands = [x, merged]
    biases = [bias_of(node) for node in group]
    if any(bias is not None for bias in biases):
        like = next(program.weights[bias.name] for bias in biases if bias is not None)
        stacked = [
            Constant(torch.zeros(weight_of(node).meta["val"].shape[0], dtype=like.dtype))
            if bias is None
            else program.weights[bias.name]
            for node, bias in zip(group, biases, strict=True)
        ]
        operands.append(new_weight(program, name.removesuffix("_weight") + "_bias", Concat(tuple(stacked))))
    linear = call(group[0], aten.linear.default, *operands)
    widths = [size(node)[-1] for node in group]
    split = call(group[0], aten.split_with_sizes.default, linear, widths, -1)
    parts = [call(group[0], operator.getitem, split, index) for index in range(len(group))]
    for node, part in zip(group, parts, strict=True):
        replace(node, part)


def joined_name(nodes: list[fx.Node]) -> str:
    """Return one name for several: what differs is listed between what they share ("attn_q_k_v_proj_weight")."""
    names = [node.name.split("_") for node in nodes]
    shortest = min(len(name) for name in names)
    head = 0
    while head < shortest and len({name[head] for name in names}) == 1:
        head += 1
    tail = 0
    while tail < shortest - head and len({name[-1 - tail] for name in names}) == 1:
        tail += 1
    middle = [part for name in names for part in name[head : len(name) - tail]]
    return "_".join(names[0][:head] + middle + names[0][len(names[0]) - tail :])
