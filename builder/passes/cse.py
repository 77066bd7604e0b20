"""`a = f(x); b = f(x) => b is a`, for calls and for weights that are the same expression."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Constant, Program, Rewrite
from llmbuild.builder.passes.edit import arguments, freeze, replace

SMALL = 1 << 20  # constants up to this many bytes (inv_freq, masks) are compared by value


def cse(program: Program) -> Rewrite:
    log = Rewrite("cse", 0)
    seen: dict[Any, fx.Node] = {}
    for node in list(program.graph.nodes):
        key = weight_key(program, node) if node.op == "placeholder" else call_key(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            replace(node, first)
            log.count += 1
    program.drop_unused_weights()
    return log


def call_key(node: fx.Node) -> Any:
    """Return a key that equal calls share, or None for calls that must not be merged (caches, random numbers)."""
    if node.op != "call_function" or node.target is torch.ops.llmbuild.paged_attention.default:
        return None
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return None
    return (node.target, freeze(arguments(node)))


def weight_key(program: Program, node: fx.Node) -> Any:
    expr = program.weight_of(node)
    if isinstance(expr, Constant):
        value = expr.value
        if value.numel() * value.element_size() > SMALL:
            return ("weight", id(value))
        return (
            "constant",
            value.dtype,
            tuple(value.shape),
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    return None if expr is None else ("weight", expr)
