"""Mixtures of experts: MoeExperts and BlockMoeExperts (native/), or a loop over the experts that are hit.

The portable form is an ONNX Loop that runs once for each expert that some token chose: it gathers that expert's
weights and tokens, multiplies, and adds the weighted results to those tokens' rows. The alternative, gathering the
weights of all T·K pairs for one batched product, reads the same bytes at T = 1 but T·K / experts-hit times as many in a
prefill; running all experts on all tokens computes E / K times too much. The Loop costs some 20 small operators an
expert and a copy of each expert's weights, which the native operators avoid. Weights in blocks become float32 there
whenever their expert is hit: small in the file and in memory, but slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype, size
from llmbuild.builder.targets.cpu.lower.linear import block_form, external, records, weight_attributes
from llmbuild.builder.targets.onnx_graph.blocks import Array, Blocks, blocks_of, padded
from llmbuild.builder.targets.onnx_graph.emitter import CONTRIB, NATIVE, Emitter
from llmbuild.builder.targets.onnx_graph.pointwise import activate
from llmbuild.builder.targets.onnx_graph.rule import Rule, cast, reshape

NATIVE_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "relu2": 3, "sigmoid": 4}  # native/activation.h


@dataclass(frozen=True)
class Activation:
    """The last arguments of `moe_experts`."""

    name: str
    gated: bool
    slope: float
    limit: float | None
    shift: float

    def attributes(self) -> dict[str, Any]:
        """As the native operators read them; a limit of 0 is none."""
        return {
            "activation": NATIVE_ACTIVATIONS[self.name],
            "gated": int(self.gated),
            "slope": float(self.slope),
            "limit": float(self.limit or 0.0),
            "shift": float(self.shift),
        }


# An expert's weight [N, K], given the number of the expert.
Matrix = Callable[[str], str]


def moe_experts(e: Emitter, node: fx.Node) -> str:
    x, ids, scores, up, down, up_bias, down_bias, *rest = arguments(node)
    kind = Activation(*rest)
    if e.native and kind.name in NATIVE_ACTIVATIONS:
        names = [e.tensor(x), *routing(e, ids, scores), e.tensor(up), e.tensor(down), *optional(e, up_bias, down_bias)]
        return e.op("MoeExperts", *names, domain=NATIVE, **kind.attributes())

    def plain(weight: fx.Node) -> Matrix:
        return lambda expert: e.op("Gather", e.tensor(weight), expert, axis=0)

    return loop(e, node, plain(up), plain(down), up_bias, down_bias, kind)


def moe_experts_blockwise(e: Emitter, node: fx.Node) -> str:
    x, ids, scores, *weights = arguments(node)[:11]
    up_bias, down_bias, *rest = arguments(node)[11:]
    kind = Activation(*rest)
    blocks = [blocks_of(e.program, *weights[at : at + 3], *weights[at + 3][1:]) for at in (0, 4)]
    experts = weights[3][0]
    whole_tiles = all(weight.rows // experts % 8 == 0 for weight in blocks)
    if e.native and kind.name in NATIVE_ACTIVATIONS and whole_tiles:
        names = [e.tensor(x), *routing(e, ids, scores), *(records(e, weight) for weight in blocks)]
        attributes = {"experts": experts, **kind.attributes()}
        for prefix, weight in zip(("up_", "down_"), blocks, strict=True):
            named = {**weight_attributes(weight), "N": weight.rows // experts}
            attributes |= {prefix + name: value for name, value in named.items()}
        names += optional(e, up_bias, down_bias)
        return e.op("BlockMoeExperts", *names, domain=NATIVE, **attributes)
    up, down = (dequantized_expert(e, weight, experts) for weight in blocks)
    return loop(e, node, up, down, up_bias, down_bias, kind)


def routing(e: Emitter, ids: fx.Node, scores: fx.Node) -> list[str]:
    return [cast(e, e.tensor(ids), dtype(ids), torch.int32), cast(e, e.tensor(scores), dtype(scores), torch.float32)]


def optional(e: Emitter, *nodes: fx.Node | None) -> list[str]:
    return ["" if node is None else e.tensor(node) for node in nodes]


def loop(e: Emitter, node: fx.Node, up: Matrix, down: Matrix, up_bias: Any, down_bias: Any, kind: Activation) -> str:
    """The portable form; see the module."""
    x, ids, scores = node.args[:3]
    assert isinstance(ids, fx.Node) and isinstance(scores, fx.Node)
    per_token = e.constant(int(size(ids)[1]), np.int64)
    tokens = e.tensor(x)
    flat = cast(e, reshape(e, e.tensor(ids), -1), dtype(ids), torch.int64)
    weights = reshape(e, cast(e, e.tensor(scores), dtype(scores), torch.float32), -1, 1)
    hit = e.ops("Unique", flat, outputs=(True, False, False, False), sorted=1)[0]
    empty = e.op("ConstantOfShape", e.op("Shape", tokens), value=e.attribute_tensor(np.zeros(1, np.float32)))
    biases = [None if bias is None else e.tensor(bias) for bias in (up_bias, down_bias)]

    def bias(which: str | None, expert: str) -> list[str]:
        return [] if which is None else [e.op("Gather", which, expert, axis=0)]

    def body(turn: str, total: str) -> str:
        expert = e.op("Gather", hit, turn, axis=0)
        pairs = reshape(e, e.op("NonZero", e.op("Equal", flat, expert)), -1)
        rows = e.op("Div", pairs, per_token)
        hidden = e.op("Gemm", e.op("Gather", tokens, rows, axis=0), up(expert), *bias(biases[0], expert), transB=1)
        hidden = between(e, hidden, kind)
        result = e.op("Gemm", hidden, down(expert), *bias(biases[1], expert), transB=1)
        result = e.op("Mul", result, e.op("Gather", weights, pairs, axis=0))
        return e.op("ScatterND", total, e.op("Unsqueeze", rows, e.ints(-1)), result, reduction="add")

    return e.loop(e.op("Size", hit), empty, TensorProto.FLOAT, body)


def between(e: Emitter, hidden: str, kind: Activation) -> str:
    """`plugins.moe_reference.inner`."""
    if not kind.gated:
        return activation(e, hidden, kind)
    gate, up = e.ops("Split", hidden, outputs=2, axis=-1, num_outputs=2)
    if kind.limit is not None:
        limit = e.constant(kind.limit, np.float32)
        gate = e.op("Min", gate, limit)
        up = e.op("Min", e.op("Max", up, e.constant(-kind.limit, np.float32)), limit)
    if kind.shift:
        up = e.op("Add", up, e.constant(kind.shift, np.float32))
    return e.op("Mul", activation(e, gate, kind), up)


def activation(e: Emitter, x: str, kind: Activation) -> str:
    if kind.name == "silu":
        return e.op("QuickGelu", x, domain=CONTRIB, alpha=float(kind.slope))
    return activate(e, x, kind.name)


def dequantized_expert(e: Emitter, weight: Blocks, experts: int) -> Matrix:
    """Values and scales stay small in the file; those of an expert become float32 when it is hit."""
    rows, wide = weight.rows // experts, weight.blocks * weight.block_size
    packed = wide // 2 if weight.bits == 4 else wide
    values = external(e, weight, "bytes", (experts, rows, packed), halves, np.uint8)
    parts = ["scales", "offsets"] if weight.has_offset else ["scales"]
    names = [
        external(e, weight, part, (experts, rows, weight.blocks, 1), partial(per_block, part=at))
        for at, part in enumerate(parts, start=1)
    ]

    def matrix(expert: str) -> str:
        q = e.op("Gather", values, expert, axis=0)
        if weight.bits == 4:
            low = e.op("BitwiseAnd", q, e.constant(15, np.uint8))
            q = e.op("Concat", low, e.op("BitShift", q, e.constant(4, np.uint8), direction="RIGHT"), axis=1)
        q = e.op("Sub", e.op("Cast", q, to=TensorProto.FLOAT), e.constant(weight.zero, np.float32))
        scale, *offset = (e.op("Gather", name, expert, axis=0) for name in names)
        full = e.op("Mul", reshape(e, q, rows, weight.blocks, weight.block_size), scale)
        for each in offset:
            full = e.op("Add", full, each)
        full = reshape(e, full, rows, wide)
        return full if wide == weight.columns else e.op("Slice", full, e.ints(0), e.ints(weight.columns), e.ints(1))

    return matrix


def halves(weight: Blocks) -> Array:
    """q as bytes, row by row; of 4 bits the first half of a row lies in the low halves of the bytes."""
    wide = weight.blocks * weight.block_size
    q = padded(weight.load()[0], weight.rows, wide, weight.zero)
    if weight.bits == 4:
        q = q[:, : wide // 2] | (q[:, wide // 2 :] << 4)
    return q


def per_block(weight: Blocks, part: int) -> Array:
    values = weight.load()[part]
    assert values is not None
    return values


def known_forms(node: fx.Node) -> str | None:
    up_q, *_, up, down_q = arguments(node)[3:8]
    down = arguments(node)[10]
    return expert_form(up_q, up) or expert_form(down_q, down)


def expert_form(q: fx.Node, form: list[int]) -> str | None:
    _, bits, block_size, _ = form
    columns = size(q)[-1]
    if bits == 4 and block_size % 2:
        return f"4-bit blocks of {block_size} columns, which is odd"
    return block_form(bits, block_size, columns)


RULES: dict[Any, Rule] = {
    torch.ops.llmbuild.moe_experts.default: Rule(moe_experts),
    torch.ops.llmbuild.moe_experts_blockwise.default: Rule(moe_experts_blockwise, known_forms),
}
