"""Elementwise arithmetic, comparisons and reductions over channels."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, axis, dtype, rank, size
from llmbuild.builder.targets.onnx_graph.emitter import CONTRIB, Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule, operand

aten = torch.ops.aten


def binary(e: Emitter, node: fx.Node, kind: str) -> str:
    left, right = node.args[:2]
    compared = kind in ("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal")
    want = torch.promote_types(*(_dtype(side, node) for side in (left, right))) if compared else dtype(node)
    return e.op(kind, operand(e, left, want), operand(e, right, want))


def _dtype(value: Any, node: fx.Node) -> torch.dtype:
    if isinstance(value, fx.Node):
        return dtype(value)
    other = next(arg for arg in node.args[:2] if isinstance(arg, fx.Node))
    return dtype(other)


def plain_alpha(node: fx.Node) -> str | None:
    alpha = node.kwargs.get("alpha", 1)
    return None if alpha == 1 else f"alpha={alpha}"


def plain_rounding(node: fx.Node) -> str | None:
    mode = node.kwargs.get("rounding_mode")
    return None if mode is None else f"rounding_mode={mode!r}"


def reverse_subtract(e: Emitter, node: fx.Node) -> str:
    left, right = node.args[:2]
    return e.op("Sub", operand(e, right, dtype(node)), operand(e, left, dtype(node)))


def unary(e: Emitter, node: fx.Node, kind: str) -> str:
    return e.op(kind, operand(e, node.args[0], dtype(node)))


def rsqrt(e: Emitter, node: fx.Node) -> str:
    return e.op("Reciprocal", e.op("Sqrt", operand(e, node.args[0], dtype(node))))


def expm1(e: Emitter, node: fx.Node) -> str:
    """e^x - 1. Near 0 this has the absolute error of float32 around 1, not a relative one: ONNX has no better."""
    return e.op("Sub", unary(e, node, "Exp"), operand(e, 1, dtype(node)))


def log1p(e: Emitter, node: fx.Node) -> str:
    """log(1 + x), with the absolute error of float32 near 0, as `expm1`."""
    return e.op("Log", e.op("Add", operand(e, node.args[0], dtype(node)), operand(e, 1, dtype(node))))


def square(e: Emitter, node: fx.Node) -> str:
    x = operand(e, node.args[0], dtype(node))
    return e.op("Mul", x, x)


def power(e: Emitter, node: fx.Node) -> str:
    if node.args[1] == 2:
        return square(e, node)
    return e.op("Pow", operand(e, node.args[0], dtype(node)), operand(e, node.args[1], dtype(node)))


def silu(e: Emitter, x: str) -> str:
    """x·sigmoid(x) in one operator: onnxruntime's QuickGelu with a factor of 1, or Swish, which came with opset 24."""
    return e.op("QuickGelu", x, domain=CONTRIB, alpha=1.0) if e.contrib else e.op("Swish", x)


def activate(e: Emitter, x: str, activation: str) -> str:
    """Append one of `plugins.ops.ACTIVATIONS`."""
    if activation == "silu":
        return silu(e, x)
    if activation == "gelu":
        return e.op("Gelu", x)
    if activation == "gelu_tanh":
        return e.op("Gelu", x, approximate="tanh")
    if activation == "relu":
        return e.op("Relu", x)
    if activation == "relu2":
        positive = e.op("Relu", x)
        return e.op("Mul", positive, positive)
    if activation == "sigmoid":
        return e.op("Sigmoid", x)
    raise AssertionError(activation)


def activation(e: Emitter, node: fx.Node, name: str) -> str:
    return activate(e, e.tensor(node.args[0]), name)


def gelu(e: Emitter, node: fx.Node) -> str:
    approximate = arguments(node)[1]
    return activate(e, e.tensor(node.args[0]), "gelu_tanh" if approximate == "tanh" else "gelu")


def gated_activation(e: Emitter, node: fx.Node) -> str:
    gate, up, name = node.args
    assert isinstance(name, str)
    return e.op("Mul", activate(e, e.tensor(gate), name), e.tensor(up))


def plain_softplus(node: fx.Node) -> str | None:
    """torch goes over to x itself above a threshold; from 20 on the two are one number in float32."""
    _, beta, threshold = arguments(node)
    return None if beta == 1 and threshold >= 20 else f"beta={beta}, threshold={threshold}"


def clamp(e: Emitter, node: fx.Node) -> str:
    x, low, high = arguments(node)[:3]
    name = operand(e, x, dtype(node))
    if low is not None:
        name = e.op("Max", name, operand(e, low, dtype(node)))
    return name if high is None else e.op("Min", name, operand(e, high, dtype(node)))


def where(e: Emitter, node: fx.Node) -> str:
    condition, left, right = node.args
    return e.op("Where", e.tensor(condition), operand(e, left, dtype(node)), operand(e, right, dtype(node)))


def reduce(e: Emitter, node: fx.Node, kind: str) -> str:
    source, dims, keep = arguments(node)[:3]
    axes = e.ints(*(axis(dim, rank(source)) for dim in dims))
    return e.op(kind, operand(e, source, dtype(node)), axes, keepdims=int(keep))


def logic(e: Emitter, node: fx.Node, kind: str) -> str:
    return e.op(kind, *(operand(e, side, torch.bool) for side in node.args[:2]))


def standard_deviation(e: Emitter, node: fx.Node) -> str:
    """The root of the sum of squared distances from the mean, divided by their number less one."""
    source, dims, unbiased, keep = arguments(node)
    axes = e.ints(*(axis(dim, rank(source)) for dim in dims))
    count = math.prod(int(size(source)[dim]) for dim in dims)
    x = operand(e, source, dtype(node))
    distance = e.op("Sub", x, e.op("ReduceMean", x, axes, keepdims=1))
    squares = e.op("ReduceSum", e.op("Mul", distance, distance), axes, keepdims=int(keep))
    return e.op("Sqrt", e.op("Div", squares, operand(e, count - int(unbiased), dtype(node))))


def over_channels(node: fx.Node) -> str | None:
    source, dims = arguments(node)[:2]
    tokens = not dims or any(not isinstance(source.meta["val"].shape[dim], int) for dim in dims)
    return "it reduces over the tokens" if tokens else None


def softmax(e: Emitter, node: fx.Node) -> str:
    source, dim = node.args[:2]
    return e.op("Softmax", operand(e, source, dtype(node)), axis=axis(dim, rank(source)))  # type: ignore[arg-type]


UNARY = {
    aten.neg.default: "Neg",
    aten.abs.default: "Abs",
    aten.exp.default: "Exp",
    aten.log.default: "Log",
    aten.sqrt.default: "Sqrt",
    aten.reciprocal.default: "Reciprocal",
    aten.cos.default: "Cos",
    aten.sin.default: "Sin",
    aten.tanh.default: "Tanh",
    aten.floor.default: "Floor",
    aten.ceil.default: "Ceil",
    aten.logical_not.default: "Not",
}
LOGIC = {
    aten.logical_and.default: "And",
    aten.logical_or.default: "Or",
}
BINARY = {
    aten.mul.Tensor: "Mul",
    aten.mul.Scalar: "Mul",
    aten.div.Tensor: "Div",
    aten.div.Scalar: "Div",
    aten.minimum.default: "Min",
    aten.maximum.default: "Max",
    aten.min.other: "Min",
    aten.max.other: "Max",
    aten.lt.Scalar: "Less",
    aten.lt.Tensor: "Less",
    aten.gt.Scalar: "Greater",
    aten.gt.Tensor: "Greater",
    aten.le.Scalar: "LessOrEqual",
    aten.ge.Scalar: "GreaterOrEqual",
    aten.eq.Scalar: "Equal",
}
ACTIVATIONS = {
    aten.silu.default: "silu",
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
}
RULES: dict[Any, Rule] = {
    **{op: Rule(partial(unary, kind=kind)) for op, kind in UNARY.items()},
    **{op: Rule(partial(binary, kind=kind)) for op, kind in BINARY.items()},
    **{op: Rule(partial(logic, kind=kind)) for op, kind in LOGIC.items()},
    **{op: Rule(partial(activation, name=name)) for op, name in ACTIVATIONS.items()},
    aten.add.Tensor: Rule(partial(binary, kind="Add"), plain_alpha),
    aten.add.Scalar: Rule(partial(binary, kind="Add"), plain_alpha),
    aten.sub.Tensor: Rule(partial(binary, kind="Sub"), plain_alpha),
    aten.sub.Scalar: Rule(partial(binary, kind="Sub"), plain_alpha),
    aten.rsub.Scalar: Rule(reverse_subtract, plain_alpha),
    aten.div.Tensor_mode: Rule(partial(binary, kind="Div"), plain_rounding),
    aten.rsqrt.default: Rule(rsqrt),
    aten.square.default: Rule(square),
    aten.expm1.default: Rule(expm1),
    aten.log1p.default: Rule(log1p),
    aten.pow.Tensor_Scalar: Rule(power),
    aten.gelu.default: Rule(gelu),
    aten.softplus.default: Rule(partial(unary, kind="Softplus"), plain_softplus),
    aten.clamp.default: Rule(clamp),
    aten.clamp.Tensor: Rule(clamp),
    aten.where.self: Rule(where),
    aten.where.ScalarOther: Rule(where),
    aten.where.ScalarSelf: Rule(where),
    aten.std.dim: Rule(standard_deviation, over_channels),
    aten.mean.dim: Rule(partial(reduce, kind="ReduceMean"), over_channels),
    aten.sum.dim_IntList: Rule(partial(reduce, kind="ReduceSum"), over_channels),
    aten.amax.default: Rule(partial(reduce, kind="ReduceMax"), over_channels),
    aten.softmax.int: Rule(softmax),
    aten._softmax.default: Rule(softmax),
    torch.ops.llmbuild.gated_activation.default: Rule(gated_activation),
}
