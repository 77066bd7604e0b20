"""Mixtures of experts: every expert on every token, and then the weighted sum of those that the token chose.

The parser has no operator that runs chosen experts alone. Gathering the weights of all T·K pairs would read as many
bytes as a decode of one sequence needs, and T·K / E times too many in a prefill; a loop over experts cannot be built
(its length is data). So all E experts are computed, in one batched product each: docs/decisions says what it costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype, size
from llmbuild.builder.targets.onnx_graph.blocks import blocks_of
from llmbuild.builder.targets.onnx_graph.emitter import Emitter
from llmbuild.builder.targets.onnx_graph.pointwise import activate
from llmbuild.builder.targets.onnx_graph.rule import Rule, cast, operand
from llmbuild.builder.targets.tensorrt.lower.linear import block_weight


def moe_experts(e: Emitter, node: fx.Node) -> str:
    up, down, up_bias, down_bias, *kind = arguments(node)[3:]
    return dense(e, node, e.tensor(up), e.tensor(down), up_bias, down_bias, int(size(up)[0]), *kind)


def moe_experts_blockwise(e: Emitter, node: fx.Node) -> str:
    x, _, _, *weights = arguments(node)[:11]
    up_bias, down_bias, *kind = arguments(node)[11:]
    experts = weights[3][0]
    up, down = (
        block_weight(e, blocks_of(e.program, *weights[at : at + 3], *weights[at + 3][1:]), dtype(x), experts)
        for at in (0, 4)
    )
    return dense(e, node, up, down, up_bias, down_bias, experts, *kind)


def dense(
    e: Emitter,
    node: fx.Node,
    up: str,
    down: str,
    up_bias: Any,
    down_bias: Any,
    experts: int,
    activation: str,
    gated: bool,
    slope: float,
    limit: float | None,
    shift: float,
) -> str:
    """up [E, 2I, H] or [E, I, H] and down [E, H, I] by name -> [T, H]."""
    x, ids, scores = node.args[:3]
    assert isinstance(x, fx.Node) and isinstance(ids, fx.Node) and isinstance(scores, fx.Node)
    have = dtype(x)
    rows = e.op("Unsqueeze", e.tensor(x), e.ints(0))  # [1, T, H]
    hidden = product(e, rows, up, up_bias, have)
    hidden = between(e, hidden, have, activation, gated, slope, limit, shift)
    results = cast(e, product(e, hidden, down, down_bias, have), have, torch.float32)  # [E, T, H]
    share = e.op("Unsqueeze", e.op("Transpose", shares(e, ids, scores, experts), perm=[1, 0]), e.ints(2))
    total = e.op("ReduceSum", e.op("Mul", results, share), e.ints(0), keepdims=0)
    return cast(e, total, torch.float32, have)


def product(e: Emitter, x: str, weight: str, bias: Any, have: torch.dtype) -> str:
    """[1 or E, T, K] times [E, N, K] -> [E, T, N], plus bias [E, N]."""
    y = e.op("MatMul", x, e.op("Transpose", weight, perm=[0, 2, 1]))
    return y if bias is None else e.op("Add", y, e.op("Unsqueeze", operand(e, bias, have), e.ints(1)))


def shares(e: Emitter, ids: fx.Node, scores: fx.Node, experts: int) -> str:
    """float32 [T, E]: the score of each expert that the token chose, 0 for the others."""
    chosen = e.op("Unsqueeze", cast(e, e.tensor(ids), dtype(ids), torch.int64), e.ints(2))  # [T, K, 1]
    one_hot = e.op("Equal", chosen, e.constant(np.arange(experts)[None, None], np.int64))  # [T, K, E]
    weight = e.op("Unsqueeze", cast(e, e.tensor(scores), dtype(scores), torch.float32), e.ints(2))
    return e.op("ReduceSum", e.op("Mul", e.op("Cast", one_hot, to=TensorProto.FLOAT), weight), e.ints(1), keepdims=0)


def between(
    e: Emitter,
    hidden: str,
    have: torch.dtype,
    activation: str,
    gated: bool,
    slope: float,
    limit: float | None,
    shift: float,
) -> str:
    """`plugins.moe_reference.inner`."""
    if not gated:
        return activated(e, hidden, have, activation, slope)
    gate, up = e.ops("Split", hidden, outputs=2, axis=-1, num_outputs=2)
    if limit is not None:
        most, least = operand(e, limit, have), operand(e, -limit, have)
        gate = e.op("Min", gate, most)
        up = e.op("Min", e.op("Max", up, least), most)
    if shift:
        up = e.op("Add", up, operand(e, shift, have))
    return e.op("Mul", activated(e, gate, have, activation, slope), up)


def activated(e: Emitter, x: str, have: torch.dtype, activation: str, slope: float) -> str:
    if activation == "silu" and slope != 1.0:
        return e.op("Mul", x, e.op("Sigmoid", e.op("Mul", x, operand(e, slope, have))))
    return activate(e, x, activation)


RULES: dict[Any, Rule] = {
    torch.ops.llmbuild.moe_experts.default: Rule(moe_experts),
    torch.ops.llmbuild.moe_experts_blockwise.default: Rule(moe_experts_blockwise),
}
