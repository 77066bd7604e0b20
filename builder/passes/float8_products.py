"""`linear(x, W) => linear_scaled(quantize_rows(x), W)`: weights and activations as 8-bit floats.

`float8_weight` says how a weight is held, before linears are merged: only what is held alike, and multiplied with
activations that are rounded alike, becomes one matrix. `use_float8` makes the products once they are.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from llmbuild.builder.frontend.stored_float8 import StoredFloat8, input_scale, stored_float8
from llmbuild.builder.ir import Concat, Program, Rewrite, Stack, WeightExpr
from llmbuild.builder.passes.edit import arg, arguments, call, dtype, is_call, replace, size
from llmbuild.builder.passes.fold_weights import new_weight
from llmbuild.builder.passes.linear_inputs import Known
from llmbuild.quantization.float8 import FLOAT8, Float8Part, Float8Weight, InputScale, RoundedFloat8
from llmbuild.quantization.formats_fp8 import BLOCK
from llmbuild.quantization.gptq_float8 import CompensatedFloat8
from llmbuild.quantization.recipes import Fp8, KeepStored, PerGroup, PerTensor, observes

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
MULTIPLE = 16  # of which rows and columns of a weight must be: what the GEMM libraries read
DYNAMIC = "a scale a token"
BY_GROUP = f"a scale for {BLOCK[1]} channels of a token"


def float8_weight(
    program: Program, node: fx.Node, scheme: Fp8 | KeepStored, known: Known | None
) -> tuple[WeightExpr | None, str | None]:
    """Return the weight as 8-bit floats, None where it stays as it is; and what is to be said about it, or None."""
    expr = program.weights[node.name]
    stored = stored_float8(expr)
    if isinstance(scheme, KeepStored):
        return (None, None) if stored is None else kept(program, node, scheme)
    reason = why_unrounded(program, node)
    if reason is not None:
        return None, reason
    columns = expr.shape[1]
    by_group = isinstance(scheme.activations, PerGroup)
    if by_group and columns % BLOCK[1]:
        return None, f"rows of {columns} numbers are not made of blocks of {BLOCK[1]}"
    if stored is not None:  # rounding again gains nothing
        block = stored[1].product_block
        if block is None:
            return None, f"dequantized: no product has the scales of {stored[1].label}"
        by_group = block == BLOCK
        if by_group != isinstance(scheme.activations, PerGroup):
            said = f"stored as {stored[1].label}, which activations follow"
            return StoredFloat8(expr, block, None, BY_GROUP if by_group else DYNAMIC), said
    else:
        block = BLOCK if by_group else (1, columns)
    if not observes(scheme):
        scales: tuple[InputScale | None, str] = (None, BY_GROUP if by_group else DYNAMIC)
    elif known is None:
        what = "rounded to nearest" if scheme.compensation is not None else "activations have a scale a token"
        said = f"{what}: it is not the weight of one linear alone, whose inputs were observed"
        return (RoundedFloat8 if stored is None else StoredFloat8)(expr, block, None, DYNAMIC), said
    else:
        static = isinstance(scheme.activations, PerTensor)
        scales = (InputScale(*known), f"the scale of {known.key}") if static else (None, DYNAMIC)
    if stored is not None:
        return StoredFloat8(expr, block, *scales), None
    if scheme.compensation is not None and known is not None:
        how, (statistics, key) = scheme.compensation, known
        return CompensatedFloat8(expr, block, *scales, compensation=how, statistics=statistics, key=key), None
    return RoundedFloat8(expr, block, *scales), None


def kept(program: Program, node: fx.Node, scheme: KeepStored) -> tuple[WeightExpr | None, str | None]:
    """`float8_weight` of a weight that the checkpoint stores as 8-bit floats, for recipes that keep what is stored."""
    expr = program.weights[node.name]
    found = stored_float8(expr)
    assert found is not None
    weight, layout = found
    if not scheme.float8_products:
        return None, f"dequantized from {layout.label}: the target has no products of 8-bit floats"
    reason = why_unrounded(program, node)
    if layout.activations is None:
        reason = reason or "the checkpoint does not round activations as products of 8-bit floats do"
    block = layout.product_block
    if block is None or (layout.activations == "group") != (block == BLOCK):
        reason = reason or "no product has such scales"
    if reason is not None or block is None:
        return None, f"dequantized from {layout.label}: {reason}"
    if layout.activations == "tensor":
        return StoredFloat8(expr, block, *input_scale(weight)), None
    return StoredFloat8(expr, block, None, BY_GROUP if layout.activations == "group" else DYNAMIC), None


def why_unrounded(program: Program, node: fx.Node) -> str | None:
    """Return why a weight cannot be multiplied as 8-bit floats, None if it can."""
    expr = program.weights[node.name]
    if isinstance(expr, Stack) or any(is_call(user, llmbuild.moe_experts.default) for user in node.users):
        return "experts have no products of 8-bit floats: they stay in the computation dtype"
    if not all(is_call(user, aten.linear.default) for user in node.users):
        return "it is the embedding too, which is looked up unrounded"
    if len(expr.shape) != 2 or any(dim % MULTIPLE for dim in expr.shape):
        return f"products of 8-bit floats need sizes that are multiples of {MULTIPLE}, not {list(expr.shape)}"
    return None


def float8_parts(expr: WeightExpr) -> Sequence[Float8Weight]:
    """Return the 8-bit float weights that lie below one another in a weight; none if it is another one."""
    parts: tuple[object, ...] = expr.parts if isinstance(expr, Concat) else (expr,)
    found = [part for part in parts if isinstance(part, Float8Weight)]
    return found if len(found) == len(parts) else []


def held_alike(expr: Float8Weight) -> str:
    """Return a text that is equal for weights that can be one matrix: all but the last of whole blocks of rows."""
    ragged = expr.block[0] > 1 and expr.shape[0] % expr.block[0]
    return expr.label + (f", {sorted(expr.sources())}" if ragged else "")


def use_float8(program: Program) -> Rewrite:
    """Make products of 8-bit floats of all linears whose weights are held as such."""
    log = Rewrite("use_float8", 0)
    for node in [node for node in program.graph.nodes if program.weight_of(node) is not None]:
        parts = float8_parts(program.weights[node.name])
        if not parts:
            continue
        first = parts[0]
        w, w_scale = (
            new_weight(program, f"{node.name}_{name}", Concat(pieces) if len(pieces) > 1 else pieces[0])
            for name, pieces in ((name, tuple(Float8Part(part, name) for part in parts)) for name in ("q", "scale"))
        )
        scale = None
        if first.input_scale is not None:
            scale = new_weight(program, f"{node.name}_input_scale", first.input_scale)
        for user in list(node.users):
            assert is_call(user, aten.linear.default) and arg(user, 1) is node
            q, scales = rounded(user, scale, first.block)
            bias = arguments(user)[2]
            block = list(first.block)
            replace(user, call(user, llmbuild.linear_scaled.default, q, w, scales, w_scale, bias, block, dtype(user)))
            log.count += 1
    program.drop_unused_weights()
    return log


def rounded(linear: fx.Node, scale: fx.Node | None, block: tuple[int, int]) -> tuple[fx.Node, fx.Node]:
    """Round what a linear reads; return the numbers [.., K] and their scales [.., K / columns of a block]."""
    x = arg(linear, 0)
    columns = int(size(x)[-1])
    groups = columns // block[1] if block[1] < columns else 1
    leading = [-1, *(int(dim) for dim in size(x)[1:-1])]
    if groups > 1:
        x = call(linear, aten.reshape.default, x, [*leading, groups, block[1]])
    rows = call(linear, llmbuild.quantize_rows.default, x, scale, FLOAT8)
    q, scales = (call(linear, operator.getitem, rows, place) for place in (0, 1))
    if groups > 1:
        q = call(linear, aten.reshape.default, q, [*leading, columns])
        scales = call(linear, aten.reshape.default, scales, [*leading, groups])
    return q, scales
