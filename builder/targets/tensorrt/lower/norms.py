"""Norms as standard operators. Statistics are float32, as the canonical ops say."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype, size
from llmbuild.builder.targets.onnx_graph.emitter import Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule, cast, operand

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild


def rms_norm(e: Emitter, node: fx.Node) -> str:
    x, weight, epsilon, round_first = arguments(node)
    return normalized(e, e.tensor(x), node, weight, epsilon, round_first)


def normalized(e: Emitter, x: str, node: fx.Node, weight: fx.Node | None, epsilon: float, round_first: bool) -> str:
    """RMSNormalization casts the normalised row to its input's type and then multiplies: that is `round_first`. Where
    the weight comes first, all is done in float32.

    Args:
        x: Its ONNX name, in the dtype of `node`'s first argument.
    """
    source: Any = node.args[0]
    have = dtype(source)
    wide = have if round_first or weight is None else torch.float32
    if weight is not None:  # torch promotes a weight of another dtype; the operator has one type for both
        wide = torch.promote_types(wide, dtype(weight))
    scale = operand(e, ones(source) if weight is None else weight, wide)
    y = e.op("RMSNormalization", cast(e, x, have, wide), scale, axis=-1, epsilon=epsilon, stash_type=1)
    return cast(e, y, wide, have)


def ones(source: fx.Node) -> list[float]:
    """The weight of a norm without one: the operators always have it."""
    return [1.0] * int(size(source)[-1])


def add_rms_norm(e: Emitter, node: fx.Node) -> tuple[str, str]:
    x, residual, weight, epsilon, round_first = arguments(node)
    total = e.op("Add", e.tensor(x), operand(e, residual, dtype(x)))
    return normalized(e, total, node, weight, epsilon, round_first), total


def layer_norm(e: Emitter, node: fx.Node) -> str:
    x, _, weight, bias, epsilon = arguments(node)[:5]
    have = dtype(x)
    names = [e.tensor(x), operand(e, ones(x) if weight is None else weight, have)]
    if bias is not None:
        names.append(operand(e, bias, have))
    return e.op("LayerNormalization", *names, axis=-1, epsilon=epsilon, stash_type=1)


def last_axis(node: fx.Node) -> str | None:
    shape: Any = node.args[1]
    return None if len(shape) == 1 else f"it normalises over {len(shape)} axes"


RULES: dict[Any, Rule] = {
    llmbuild.rms_norm.default: Rule(rms_norm),
    llmbuild.add_rms_norm.default: Rule(add_rms_norm),
    aten.layer_norm.default: Rule(layer_norm, last_axis),
}
