"""`x * rsqrt(mean(x²) + eps) * w => rms_norm(x, w, eps)`, and the same without a weight.

The weight must be one weight of the model, [channels]; `fold_weights` has made it so for offsets (`1 + w`). In the
bfloat16 graphs of Llama the normalised value is rounded before it is multiplied, in Gemma's after: kept as
`round_before_weight`.
"""

from __future__ import annotations

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.passes.edit import arg, call, describe, dtype, is_call, size
from llmbuild.builder.passes.matcher import (
    CAST,
    Bindings,
    Call,
    Declined,
    Number,
    OneOf,
    Value,
    add,
    mean_last,
    mul,
    pow_,
    rewrite_all,
    square,
    strip_casts,
    value_of_dtype,
)

aten = torch.ops.aten

VARIANCE = add(mean_last(square("x")), Number("eps"))
ROOT = OneOf((Call((aten.sqrt.default,), (VARIANCE,)), pow_(VARIANCE, 0.5)))
NORMALISED = OneOf(
    (
        mul(Value("x"), OneOf((Call((aten.rsqrt.default,), (VARIANCE,)), pow_(VARIANCE, -0.5)))),
        Call((aten.div.Tensor,), (Value("x"), ROOT)),
    )
)
WEIGHTED = mul(Value("w"), NORMALISED)


def rms_norm(program: Program) -> Rewrite:
    log = rewrite_all(program, "rms_norm", WEIGHTED, weighted)
    plain = rewrite_all(program, "rms_norm", NORMALISED, unweighted)
    log.count += plain.count
    log.declined.extend(plain.declined)
    log.declined.extend(leftovers(program))
    return log


def weighted(program: Program, root: fx.Node, found: Bindings) -> fx.Node:
    weight = found["w"]
    channels = size(found["x"])[-1]
    if program.weight_of(weight) is None or size(weight) != (channels,):
        raise Declined(f"the factor {describe(weight)} is not a weight of {channels} channels")
    product = strip_casts(root)
    normalised = arg(product, 0) if arg(product, 1) is weight else arg(product, 1)
    rounded = is_call(normalised, CAST) and dtype(normalised) != torch.float32
    return build(root, found, weight, rounded)


def unweighted(program: Program, root: fx.Node, found: Bindings) -> fx.Node:
    return build(root, found, None, False)


def build(root: fx.Node, found: Bindings, weight: fx.Node | None, rounded: bool) -> fx.Node:
    x = value_of_dtype(found["x"], dtype(root))
    if size(x) != size(root):
        raise Declined(f"the result {describe(root)} is broadcast from {describe(x)}")
    return call(root, torch.ops.llmbuild.rms_norm.default, x, weight, float(found["eps"]), rounded)


def leftovers(program: Program) -> list[str]:
    """Every `rsqrt` still in the graph: a norm that no rule recognised."""
    return [
        f"{node.name}: {describe(node)} is not the root of a mean square plus a number [{source_line(node)}]"
        for node in program.graph.nodes
        if is_call(node, aten.rsqrt.default)
    ]
