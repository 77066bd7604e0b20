"""Products of 8-bit integers: rows are quantized with standard operators, MatMulIntegerToFloat multiplies.

onnxruntime's own dynamic quantization has one scale for all rows, so it is of no use here. Integers are held as uint8
that count from 128: of the kernels for AVX2 only those for two unsigned operands are both fast and exact (with a signed
weight sums of two products are cut at 32767; a signed left operand is 20 times as slow).
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import fx

from llmbuild.builder.passes.edit import arg, arguments, is_call, rank, size
from llmbuild.builder.targets.onnx_graph.emitter import CONTRIB, ONNX_TYPES, Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule, onnx_shape, reshape
from llmbuild.builder.targets.weight_file import Entry
from llmbuild.plugins.scaled_ops import INVERSE, TINY

llmbuild = torch.ops.llmbuild
ZERO = 128  # what stands for 0 in uint8
FLOAT, UINT8 = np.float32, np.uint8


def quantize_rows(e: Emitter, node: fx.Node) -> tuple[str, str]:
    """q as uint8 that counts from ZERO, and scales [..., 1] ([1] where there is one for all rows).

    NaN counts as infinity, which makes the row's scale infinite: a maximum alone would pass over it.
    """
    x, given, _ = arguments(node)
    values = e.tensor(x)
    if given is None:
        nan, infinity = e.op("IsNaN", values), e.constant(np.inf, FLOAT)
        magnitude = e.op("Where", nan, infinity, e.op("Abs", values))
        largest = e.op("ReduceMax", magnitude, e.ints(-1), keepdims=1)
        found = e.op("Mul", largest, e.constant(INVERSE[torch.int8], FLOAT))
        tiny = e.op("Less", found, e.constant(TINY, FLOAT))
        scale = e.op("Where", tiny, e.constant(1, FLOAT), found)
        values = e.op("Where", nan, e.constant(0, FLOAT), values)
    else:
        scale = e.tensor(given)
    inverse = e.op("Div", e.constant(1, FLOAT), scale)
    level = e.op("Round", e.op("Mul", values, inverse))  # ties to even
    inside = e.op("Clip", level, e.constant(-127, FLOAT), e.constant(127, FLOAT))
    shifted = e.op("Add", inside, e.constant(ZERO, FLOAT))
    return e.op("Cast", shifted, to=ONNX_TYPES[torch.uint8]), scale


def why_not_rows(node: fx.Node) -> str | None:
    for part in node.users:
        for user in part.users:
            if not is_call(user, llmbuild.linear_scaled.default):
                return f"{part.name} is also read by {user.name}, which is no product of integers"
    return None


def linear_scaled(e: Emitter, node: fx.Node) -> str:
    """(float(Σ q·w) · w_scale) · x_scale + bias, in this order, as the oracle has it."""
    x, w, x_scale, w_scale, bias, _, _ = arguments(node)
    columns, rows = size(w)[::-1]
    flat = e.tensor(x) if rank(x) == 2 else reshape(e, e.tensor(x), -1, int(columns))
    scales = e.program.weights[w_scale.name]
    each = Entry((int(rows),), np.dtype(FLOAT), lambda: [scales.load().flatten().numpy()], "float32")
    zero = e.constant(ZERO, UINT8)
    sums = e.op(
        "MatMulIntegerToFloat",
        *(flat, transposed(e, w), e.constant(1, FLOAT), e.external_once(w_scale.name, each), zero, zero),
        domain=CONTRIB,
    )
    if rank(x) != 2:
        dims = onnx_shape(size(node))
        assert dims is not None
        sums = reshape(e, sums, *dims)
    y = e.op("Mul", sums, e.tensor(x_scale))
    return y if bias is None else e.op("Add", y, e.tensor(bias))


def transposed(e: Emitter, w: fx.Node) -> str:
    """Declare an int8 weight [N, K] as uint8 [K, N], once, whoever reads it."""
    expr = e.program.weights[w.name]
    rows, columns = expr.shape

    def load() -> np.ndarray:
        return np.ascontiguousarray((expr.load().numpy().view(UINT8) ^ UINT8(ZERO)).T)

    return e.external_once(f"{w.name}.columns", Entry((columns, rows), np.dtype(UINT8), lambda: [load()], "int8"))


def why_not_product(node: fx.Node) -> str | None:
    x, w, x_scale, _, _, block, dtype = arguments(node)
    parts = [arg(each, 0) if is_call(each, operator.getitem) else None for each in (x, x_scale)]
    if parts[0] is None or parts[0] is not parts[1] or not is_call(parts[0], llmbuild.quantize_rows.default):
        return "its rows and their scales are not those of one quantize_rows"
    if block[0] != 1 or block[1] < size(w)[1] or dtype != torch.float32:
        return f"scales of blocks of {block[0]} x {block[1]} (one a row is known)"
    return None


RULES: dict[Any, Rule] = {
    llmbuild.quantize_rows.default: Rule(quantize_rows, why_not_rows),
    llmbuild.linear_scaled.default: Rule(linear_scaled, why_not_product),
}
