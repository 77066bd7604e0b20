"""Products of 8-bit numbers: `quantize_rows` and `linear_scaled` as QuantizeLinear and DequantizeLinear.

One scale for all rows goes into the operators, where TensorRT looks for it. A scale for each token cannot: there the
row is divided first, the operators have the scale 1, and the product is multiplied with the token's scale.

    x / s[t] ── QuantizeLinear(1) ── DequantizeLinear(1) ── Gemm(·, DequantizeLinear(w, w_scale)) ── · s[t]
"""

from __future__ import annotations

import operator
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype, is_call, size
from llmbuild.builder.targets.onnx_graph.emitter import ONNX_TYPES, Emitter
from llmbuild.builder.targets.onnx_graph.products import on_rows
from llmbuild.builder.targets.onnx_graph.rule import Rule, cast, operand, reshape
from llmbuild.plugins.scaled_ops import INVERSE, LARGEST, TINY

llmbuild = torch.ops.llmbuild
QUANTIZE = llmbuild.quantize_rows.default


def quantize_rows(e: Emitter, node: fx.Node) -> tuple[str, str]:
    x, scale, want = arguments(node)
    rows = e.tensor(x)
    if scale is not None:
        one = static_scale(e, scale)
        if want is torch.int8:  # the operator would go down to -128
            least = e.op("Mul", one, e.constant(-LARGEST[want], np.float32))
            rows = e.op("Max", rows, cast(e, least, torch.float32, dtype(x)))
        return e.op("QuantizeLinear", rows, one, zero_point(e, want)), one
    wide = cast(e, rows, dtype(x), torch.float32)
    largest = e.op("ReduceMax", e.op("Abs", wide), e.ints(-1), keepdims=1)
    found = e.op("Mul", largest, e.constant(INVERSE[want], np.float32))
    unusable = e.op("Less", found, e.constant(TINY, np.float32))
    scales = e.op("Where", unusable, e.constant(1, np.float32), found)
    inside = e.op("Mul", wide, e.op("Reciprocal", scales))
    return e.op("QuantizeLinear", inside, e.constant(1, np.float32), zero_point(e, want)), scales


def linear_scaled(e: Emitter, node: fx.Node) -> str:
    x, w, x_scale, w_scale, bias, block, want = arguments(node)
    to = ONNX_TYPES[want]
    static = shared_scale(x_scale)
    of_rows = e.constant(1, np.float32) if static is None else static_scale(e, static)
    per_row = [] if block[0] >= int(size(w)[0]) else [-1]
    of_weight = e.shared((f"{w_scale.name}.flat",), lambda: reshape(e, e.tensor(w_scale), *per_row))
    weight = e.op("DequantizeLinear", e.tensor(w), of_weight, output_dtype=to, axis=0 if per_row else None)

    def compute(rows: str) -> str:
        return e.op("Gemm", e.op("DequantizeLinear", rows, of_rows, output_dtype=to), weight, transB=1)

    y = on_rows(e, node, x, compute)
    if static is None:
        y = e.op("Mul", cast(e, y, want, torch.float32), e.tensor(x_scale))
        if bias is not None:
            y = e.op("Add", y, operand(e, bias, torch.float32))
        return cast(e, y, torch.float32, want)
    return y if bias is None else e.op("Add", y, operand(e, bias, want))


def shared_scale(x_scale: Any) -> fx.Node | None:
    """Return the one scale of all rows, or None where each row has its own."""
    if not is_call(x_scale, operator.getitem) or not is_call(x_scale.args[0], QUANTIZE):
        return None
    scale = arguments(x_scale.args[0])[1]
    assert scale is None or isinstance(scale, fx.Node)
    return scale


def static_scale(e: Emitter, scale: fx.Node) -> str:
    """A float32 scalar from float32 [1]."""
    return e.shared((f"{scale.name}.scalar",), lambda: reshape(e, operand(e, scale, torch.float32)))


def zero_point(e: Emitter, want: torch.dtype) -> str:
    """Its type is what the operator quantizes to."""
    return e.constant(0, np.int8 if want is torch.int8 else ml_dtypes.float8_e4m3fn)


def whole_rows(node: fx.Node) -> str | None:
    _, w, _, _, _, block, _ = arguments(node)
    rows, columns = (int(n) for n in size(w))
    if block[1] < columns:
        return f"scales for blocks of {block[0]}×{block[1]}; TensorRT multiplies with one a row or one for all"
    return None if block[0] == 1 or block[0] >= rows else f"a scale for every {block[0]} rows"


RULES: dict[Any, Rule] = {
    QUANTIZE: Rule(quantize_rows),
    llmbuild.linear_scaled.default: Rule(linear_scaled, whole_rows),
}
