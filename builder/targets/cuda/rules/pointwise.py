"""Elementwise ops: the operands are needed at the index of the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype
from llmbuild.builder.targets.cuda.section import Section, Value, kind, kind_of, literal
from llmbuild.builder.targets.cuda.views import Indices, NoRule

aten = torch.ops.aten

Rule = Callable[[Section, fx.Node, Indices], Value]


def unary(section: Section, node: fx.Node, index: Indices, text: str) -> Value:
    x = section.operand(node.args[0], kind(node), index)
    return section.emit(node.name, text.format(x=x.text), kind(node), x)


def binary(section: Section, node: fx.Node, index: Indices, text: str) -> Value:
    left, right = arguments(node)[:2]
    alpha = node.kwargs.get("alpha", 1)
    a, b = section.operand(left, kind(node), index), section.operand(right, kind(node), index)
    if alpha != 1:
        b = section.emit(f"{node.name}_scaled", f"{b.text} * {literal(alpha, b.kind)}", b.kind, b)
    return section.emit(node.name, text.format(a=a.text, b=b.text), kind(node), a, b)


def compare(section: Section, node: fx.Node, index: Indices, text: str) -> Value:
    left, right = node.args[:2]
    common = common_kind(left, right)
    a, b = section.operand(left, common, index), section.operand(right, common, index)
    return section.emit(node.name, text.format(a=a.text, b=b.text), "bool", a, b)


def common_kind(*operands: Any) -> str:
    """The kind in which values are compared: that of the widest."""
    kinds = {kind(each) if isinstance(each, fx.Node) else kind_of(torch.tensor(each).dtype) for each in operands}
    return "float" if "float" in kinds else "int" if "int" in kinds else "bool"


def logic(section: Section, node: fx.Node, index: Indices, text: str) -> Value:
    operands = [section.operand(each, "bool", index) for each in node.args]
    named = dict(zip("xy", (each.text for each in operands), strict=False))
    return section.emit(node.name, text.format(**named), "bool", *operands)


def bitwise(section: Section, node: fx.Node, index: Indices, text: str) -> Value:
    if kind(node) != "bool":
        raise NoRule(node, f"bits of {dtype(node)}")
    return logic(section, node, index, text)


def cast(section: Section, node: fx.Node, index: Indices) -> Value:
    """Between floats nothing happens: values are float32 until they are stored."""
    source: Any = node.args[0]
    return section.converted(section.value(source, index), kind(node))


def divide(section: Section, node: fx.Node, index: Indices) -> Value:
    mode = node.kwargs.get("rounding_mode")
    if mode is None:
        return binary(section, node, index, "{a} / {b}")
    if mode != "floor" or kind(node) != "float":
        raise NoRule(node, f"division of {kind(node)}s with rounding_mode={mode!r}")
    return binary(section, node, index, "tl.floor({a} / {b})")


def power(section: Section, node: fx.Node, index: Indices) -> Value:
    base, exponent = node.args[:2]
    x = section.operand(base, kind(node), index)
    if isinstance(exponent, (int, float)) and exponent in (2, 3, 4):
        return section.emit(node.name, " * ".join([x.text] * int(exponent)), x.kind, x)
    if exponent == 0.5:
        return section.emit(node.name, f"tl.sqrt({x.text})", x.kind, x)
    raise NoRule(node, f"the power {exponent}")


def clamp(section: Section, node: fx.Node, index: Indices) -> Value:
    source, low, high = arguments(node)[:3]
    x = section.operand(source, kind(node), index)
    for bound, function in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            limit = section.operand(bound, x.kind, index)
            x = section.emit(node.name, f"tl.{function}({x.text}, {limit.text})", x.kind, x, limit)
    return x


def where(section: Section, node: fx.Node, index: Indices) -> Value:
    condition, yes, no = arguments(node)
    return choose(section, node, index, condition, yes, no)


def masked_fill(section: Section, node: fx.Node, index: Indices) -> Value:
    x, mask, value = arguments(node)
    return choose(section, node, index, mask, value, x)


def choose(section: Section, node: fx.Node, index: Indices, condition: Any, yes: Any, no: Any) -> Value:
    test = section.operand(condition, "bool", index)
    a, b = section.operand(yes, kind(node), index), section.operand(no, kind(node), index)
    return section.where(node.name, test.text, test.axes, a, b)


def full(section: Section, node: fx.Node, index: Indices, number: Any = None) -> Value:
    """A tensor of one number; when it is not given, it is the node's second argument."""
    number = arguments(node)[1] if number is None else number
    if not isinstance(number, (bool, int, float)):
        raise NoRule(node, f"filled with {number}")
    types = {"float": "tl.float32", "int": "tl.int64", "bool": "tl.int1"}
    return section.emit(node.name, f"tl.full((1, 1), {literal(number, kind(node))}, {types[kind(node)]})", kind(node))


def scalar_tensor(section: Section, node: fx.Node, index: Indices) -> Value:
    return full(section, node, index, node.args[0])


def arange(section: Section, node: fx.Node, index: Indices, begin: bool = True) -> Value:
    """Its value is its index."""
    first, step = (node.args[0], node.args[2] if len(node.args) > 2 else 1) if begin else (0, 1)
    if not isinstance(first, int) or not isinstance(step, int) or index[0].high is None:
        raise NoRule(node, f"the numbers {node.args}")
    value = index[0] * step + first
    number = section.emit(node.name, f"tl.full((1, 1), 0, tl.int64) + ({value.text})", "int", value.axes)
    return section.converted(number, kind(node))


def copy(section: Section, node: fx.Node, index: Indices) -> Value:
    """copy(destination, source) is the source."""
    return section.operand(node.args[1], kind(node), index)


def softplus(section: Section, node: fx.Node, index: Indices) -> Value:
    _, beta, threshold = arguments(node)
    if beta != 1 or threshold < 20:  # from 20 on it is x itself in float32
        raise NoRule(node, f"beta={beta}, threshold={threshold}")
    return unary(section, node, index, "tl.where({x} > 20.0, {x}, tl.log(1.0 + tl.exp(tl.minimum({x}, 20.0))))")


# ------------------------------------------------------------------------------------------------------ activations
def activate(section: Section, name: str, x: Value, activation: str) -> Value:
    """Write one of `plugins.ops.ACTIVATIONS`."""
    if activation == "relu2":
        positive = section.emit(name, ACTIVATIONS["relu"].format(x=x.text), "float", x)
        return section.emit(name, f"{positive.text} * {positive.text}", "float", positive)
    if activation in ("tanh", "gelu_tanh"):
        angle = x
        if activation == "gelu_tanh":
            cubic = f"0.7978845608028654 * ({x.text} + 0.044715 * {x.text} * {x.text} * {x.text})"
            angle = section.emit(f"{name}_angle", cubic, "float", x)
        # tanh a = (1 - e) / (1 + e) with e = exp(-2|a|), which cannot overflow, and the sign of a
        shrunk = section.emit(f"{name}_e", f"tl.exp(-2.0 * tl.abs({angle.text}))", "float", angle)
        size = section.emit(f"{name}_abs", f"(1.0 - {shrunk.text}) / (1.0 + {shrunk.text})", "float", shrunk)
        signed = f"tl.where({angle.text} < 0.0, -{size.text}, {size.text})"
        result = section.emit(f"{name}_tanh", signed, "float", size, angle)
        if activation == "tanh":
            return result
        return section.emit(name, f"0.5 * {x.text} * (1.0 + {result.text})", "float", x, result)
    return section.emit(name, ACTIVATIONS[activation].format(x=x.text), "float", x)


ACTIVATIONS = {
    "silu": "{x} / (1.0 + tl.exp(-{x}))",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{x}))",
    "relu": "tl.maximum({x}, 0.0)",
    "gelu": "0.5 * {x} * (1.0 + tl.erf({x} * 0.7071067811865476))",
}


def activation(section: Section, node: fx.Node, index: Indices, name: str) -> Value:
    return activate(section, node.name, section.operand(node.args[0], "float", index), name)


def gelu(section: Section, node: fx.Node, index: Indices) -> Value:
    return activation(section, node, index, "gelu_tanh" if arguments(node)[1] == "tanh" else "gelu")


def gated_activation(section: Section, node: fx.Node, index: Indices) -> Value:
    gate, up, name = arguments(node)
    a, b = section.operand(gate, "float", index), section.operand(up, "float", index)
    active = activate(section, f"{node.name}_gate", a, name)
    return section.emit(node.name, f"{active.text} * {b.text}", "float", active, b)


UNARY = {
    aten.neg.default: "-{x}",
    aten.abs.default: "tl.abs({x})",
    aten.exp.default: "tl.exp({x})",
    aten.expm1.default: "tl.exp({x}) - 1.0",
    aten.log.default: "tl.log({x})",
    aten.log1p.default: "tl.log(1.0 + {x})",
    aten.sqrt.default: "tl.sqrt({x})",
    aten.rsqrt.default: "tl.rsqrt({x})",
    aten.reciprocal.default: "1.0 / {x}",
    aten.square.default: "{x} * {x}",
    aten.cos.default: "tl.cos({x})",
    aten.sin.default: "tl.sin({x})",
    aten.erf.default: "tl.erf({x})",
    aten.floor.default: "tl.floor({x})",
    aten.ceil.default: "tl.ceil({x})",
}
BINARY = {
    aten.add.Tensor: "{a} + {b}",
    aten.add.Scalar: "{a} + {b}",
    aten.sub.Tensor: "{a} - {b}",
    aten.sub.Scalar: "{a} - {b}",
    aten.mul.Tensor: "{a} * {b}",
    aten.mul.Scalar: "{a} * {b}",
    aten.rsub.Scalar: "{b} - {a}",
    aten.minimum.default: "tl.minimum({a}, {b})",
    aten.maximum.default: "tl.maximum({a}, {b})",
    aten.min.other: "tl.minimum({a}, {b})",
    aten.max.other: "tl.maximum({a}, {b})",
}
COMPARE = {
    **{op: "{a} < {b}" for op in (aten.lt.Scalar, aten.lt.Tensor)},
    **{op: "{a} > {b}" for op in (aten.gt.Scalar, aten.gt.Tensor)},
    **{op: "{a} <= {b}" for op in (aten.le.Scalar, aten.le.Tensor)},
    **{op: "{a} >= {b}" for op in (aten.ge.Scalar, aten.ge.Tensor)},
    **{op: "{a} == {b}" for op in (aten.eq.Scalar, aten.eq.Tensor)},
    **{op: "{a} != {b}" for op in (aten.ne.Scalar, aten.ne.Tensor)},
}
RULES: dict[Any, Rule] = {
    **{op: partial(unary, text=text) for op, text in UNARY.items()},
    **{op: partial(binary, text=text) for op, text in BINARY.items()},
    **{op: partial(compare, text=text) for op, text in COMPARE.items()},
    **{
        op: partial(activation, name=name)
        for op, name in (
            (aten.silu.default, "silu"),
            (aten.relu.default, "relu"),
            (aten.sigmoid.default, "sigmoid"),
            (aten.tanh.default, "tanh"),
        )
    },
    aten.div.Tensor: divide,
    aten.div.Scalar: divide,
    aten.div.Tensor_mode: divide,
    aten.pow.Tensor_Scalar: power,
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp,
    aten.where.self: where,
    aten.where.ScalarOther: where,
    aten.where.ScalarSelf: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.logical_not.default: partial(logic, text="{x} == 0"),
    aten.logical_and.default: partial(logic, text="{x} & {y}"),
    aten.logical_or.default: partial(logic, text="{x} | {y}"),
    aten.bitwise_not.default: partial(bitwise, text="{x} == 0"),
    aten.bitwise_and.Tensor: partial(bitwise, text="{x} & {y}"),
    aten.bitwise_or.Tensor: partial(bitwise, text="{x} | {y}"),
    aten.__and__.Tensor: partial(bitwise, text="{x} & {y}"),
    aten.__or__.Tensor: partial(bitwise, text="{x} | {y}"),
    aten.to.dtype: cast,
    aten.gelu.default: gelu,
    aten.softplus.default: softplus,
    aten.copy.default: copy,
    aten.full_like.default: full,
    aten.full.default: full,
    aten.zeros_like.default: partial(full, number=0),
    aten.ones_like.default: partial(full, number=1),
    aten.new_empty.default: partial(full, number=0),  # what is never filled must at least be the same every time
    aten.new_zeros.default: partial(full, number=0),
    aten.new_ones.default: partial(full, number=1),
    aten.zeros.default: partial(full, number=0),
    aten.ones.default: partial(full, number=1),
    aten.scalar_tensor.default: scalar_tensor,
    aten.arange.default: partial(arange, begin=False),
    aten.arange.start: arange,
    aten.arange.start_step: arange,
    torch.ops.llmbuild.gated_activation.default: gated_activation,
}
