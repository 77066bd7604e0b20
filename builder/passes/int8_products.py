"""`linear(x, W) => linear_scaled(quantize_rows(x), W)`: products of 8-bit integers.

`round_inputs` puts `round_rows`, the rounding alone, before linears: merging and gathering treat it as any value.
`use_int8` makes products of it once linears are merged and weights are in blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from llmbuild.builder.ir import BlockPart, Map, Program
from llmbuild.builder.passes.edit import arg, arguments, call, dtype, is_call, replace
from llmbuild.builder.passes.fold_weights import new_weight
from llmbuild.builder.passes.linear_inputs import Known, LinearInput
from llmbuild.quantization.recipes import Int8Products, PerTensor, Scheme
from llmbuild.quantization.scaled import ScaleSearch
from llmbuild.quantization.smooth import StaticScale

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild


def round_inputs(
    program: Program,
    inputs: list[LinearInput],
    schemes: Mapping[fx.Node, Scheme],
    known: Mapping[fx.Node, Known],
    searches: Mapping[str, ScaleSearch],
) -> set[fx.Node]:
    """Round what linears of an `Int8Products` scheme read; return the weights of those linears.

    Args:
        schemes, known: Of all weights, and statistics by weight.
        searches: Of the inputs whose channels are scaled, by key.
    """
    done: set[fx.Node] = set()
    for each in inputs:
        groups: dict[Any, list[fx.Node]] = {}
        for linear in each.linears:
            scheme = schemes[arg(linear, 1)]
            if isinstance(scheme, Int8Products):
                groups.setdefault(type(scheme.activations), []).append(linear)
        for activations, linears in groups.items():
            scale = None
            if activations is PerTensor:
                statistics, key = known[arg(linears[0], 1)]
                expr = StaticScale(statistics, key, searches.get(each.key))
                scale = new_weight(program, f"{each.x.name}_scale", expr)
            rounded = call(linears[0], llmbuild.round_rows.default, each.x, scale, torch.int8)
            for linear in linears:
                linear.update_arg(0, rounded)
            done.update(arg(linear, 1) for linear in linears)
    return done


def use_int8(program: Program) -> int:
    """Make products of 8-bit integers of linears that read rounded rows. Returns how many."""
    count = 0
    for rounded in [node for node in program.graph.nodes if is_call(node, llmbuild.round_rows.default)]:
        x, scale, integer = arguments(rounded)
        rows = call(rounded, llmbuild.quantize_rows.default, x, scale, integer)
        q, scales = (call(rounded, operator.getitem, rows, place) for place in (0, 1))
        for linear in list(rounded.users):
            if not is_call(linear, aten.linear.default):
                raise AssertionError(f"{linear.name} reads {rounded.name}, which is rounded for linears")
            weight, bias = arguments(linear)[1:3]
            w, w_scale = integers(program, weight)
            block = [1, program.weights[weight.name].shape[1]]
            product = call(linear, llmbuild.linear_scaled.default, q, w, scales, w_scale, bias, block, dtype(linear))
            replace(linear, product)
            count += 1
    return count


def integers(program: Program, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Add a weight in blocks as int8 [N, K] and its scales, float32 [N, 1]."""
    expr = program.weights[weight.name]
    form = expr.block_format
    if form is None or (form.bits, form.block_size, form.has_offset) != (8, expr.shape[1], False):
        raise AssertionError(f"{weight.name} is held as {form}, not as integers with one scale a row")
    signed = partial(without_zero, zero=form.zero)
    q = Map(BlockPart(expr, "q"), signed, expr.shape, torch.int8, f"integers of {weight.name}", rowwise=True)
    return (
        new_weight(program, f"{weight.name}_int8", q),
        new_weight(program, f"{weight.name}_scale", BlockPart(expr, "scale")),
    )


def without_zero(q: Tensor, zero: int) -> Tensor:
    """uint8 that count from `zero` -> int8."""
    return (q.to(torch.int16) - zero).to(torch.int8)
