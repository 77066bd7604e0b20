"""`addmm(b, x, w) => linear(x, wᵀ, b)`; `x @ w => linear(x, wᵀ)`; `x @ vᵀ => linear(x, v)`, for weights w and v."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from llmbuild.builder.ir import Map, Program, Rewrite
from llmbuild.builder.passes.edit import arg, call, describe, is_call, rank
from llmbuild.builder.passes.fold_weights import new_weight
from llmbuild.builder.passes.matcher import Bindings, Call, Declined, OneOf, Value, rewrite_all

aten = torch.ops.aten

PRODUCT = OneOf(
    (
        Call((aten.addmm.default,), (Value("bias"), Value("x"), Value("w"))),
        Call((aten.mm.default, aten.matmul.default), (Value("x"), Value("w"))),
    )
)


def transpose_weight(weight: Tensor) -> Tensor:
    return weight.t()


def canonical_linear(program: Program) -> Rewrite:
    transposed: dict[fx.Node, fx.Node] = {}

    def rewrite(program: Program, root: fx.Node, found: Bindings) -> fx.Node:
        weight = linear_weight(program, found["w"], transposed)
        bias = [found["bias"]] if "bias" in found else []
        if bias and rank(bias[0]) != 1:
            raise Declined(f"the addend {describe(bias[0])} is not a bias")
        return call(root, aten.linear.default, found["x"], weight, *bias)

    log = rewrite_all(program, "canonical_linear", PRODUCT, rewrite)
    program.drop_unused_weights()
    return log


def linear_weight(program: Program, factor: Any, transposed: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the weight [N, K] for the right factor [K, N] of a product."""
    if is_call(factor, aten.transpose.int) and program.weight_of(arg(factor, 0)) is not None and rank(factor) == 2:
        return arg(factor, 0)
    expr = program.weight_of(factor)
    if expr is None or rank(factor) != 2:
        raise Declined(f"the right factor {describe(factor)} is not a weight matrix")
    if expr.block_format is not None:
        raise Declined(f"{factor.name} is stored in blocks ({expr.block_format.source}) along the wrong axis")
    if factor not in transposed:
        if isinstance(expr, Map) and expr.function is transpose_weight:
            flipped: Any = expr.source
        else:
            shape = (expr.shape[1], expr.shape[0])
            flipped = Map(expr, transpose_weight, shape, expr.dtype, f"transpose({factor.name})")
        transposed[factor] = new_weight(program, f"{factor.name}_t", flipped)
    return transposed[factor]
