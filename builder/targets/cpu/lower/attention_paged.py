"""Attention through the native operator: block tables as they are, K and V appended in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from onnx import TensorProto
from torch import fx

from llmbuild.builder.ir import LayerKV
from llmbuild.builder.passes.edit import arguments, rank, size
from llmbuild.builder.targets.cpu import ops  # noqa: F401  (registers the ops that the table names)
from llmbuild.builder.targets.onnx_graph.emitter import NATIVE, Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule, reshape

MAX_WIDTH = 512  # kMaxWidth of native/attend.h


def pool_names(layer: int) -> tuple[str, str]:
    return f"keys.{layer}", f"values.{layer}"


def why_not_paged(layers: tuple[LayerKV, ...]) -> str | None:
    """Return why the native operator cannot serve these layers, or None."""
    for index, layer in enumerate(layers):
        for width in (layer.head_dim, layer.v_head_dim):
            if width % 8 or width > MAX_WIDTH:
                return f"layer {index} has heads of {width} channels (multiples of 8 up to {MAX_WIDTH} are known)"
    return None


def emit(
    e: Emitter,
    tensors: Sequence[str],
    *,
    interleaved: bool,
    heads: tuple[int, int],
    widths: tuple[int, int],
    rest: tuple[Any, ...],
) -> str:
    """Append PagedAttention and return its [T, Hq·Dv].

    Args:
        tensors: q (or q|k|v), k, v, cos, sin; absent ones are "".
        rest: What follows q, k, v in `llmbuild::paged_attention`.
    """
    layer, scale, window, softcap, sinks, slopes, *_ = rest
    keys, values = pool_names(layer)
    e.add_input(keys, TensorProto.FLOAT, ["slots", heads[1] * widths[0]])
    e.add_input(values, TensorProto.FLOAT, ["slots", heads[1] * widths[1]])
    paging = [
        e.add_input("slot_mapping", TensorProto.INT32, ["T"]),
        e.add_input("block_tables", TensorProto.INT32, ["B", "blocks"]),
        e.add_input("seq_lens", TensorProto.INT32, ["B"]),
        e.add_input("cu_q_lens", TensorProto.INT32, ["B+1"]),
    ]
    optional = ["" if extra is None else e.tensor(extra) for extra in (sinks, slopes)]
    return e.op(
        "PagedAttention",
        *(*tensors, keys, values, *paging, *optional),
        domain=NATIVE,
        q_heads=heads[0],
        kv_heads=heads[1],
        key_width=widths[0],
        value_width=widths[1],
        block_size=e.limits.block_size,
        interleaved=int(interleaved),
        scale=float(scale),
        window=int(window or 0),
        softcap=float(softcap or 0.0),
    )


def attention(e: Emitter, node: fx.Node) -> str:
    q, k, v, *rest = arguments(node)
    heads = int(size(q)[1]), int(size(k)[1])
    widths = int(size(k)[2]), int(size(v)[2])
    flat = [reshape(e, e.tensor(x), -1, int(size(x)[1]) * int(size(x)[2])) for x in (q, k, v)]
    out = emit(e, [*flat, "", ""], interleaved=False, heads=heads, widths=widths, rest=tuple(rest))
    return reshape(e, out, -1, heads[0], widths[1])


def packed_attention(e: Emitter, node: fx.Node) -> str:
    qkv, cos, sin, interleaved, q_heads, kv_heads, key_width, value_width, *rest = arguments(node)
    tables = ["" if table is None else e.tensor(table) for table in (cos, sin)]
    out = emit(
        e,
        [e.tensor(qkv), "", "", *tables],
        interleaved=interleaved,
        heads=(q_heads, kv_heads),
        widths=(key_width, value_width),
        rest=tuple(rest),
    )
    users = list(node.users)
    if len(users) == 1 and rank(users[0]) == 2 and users[0].target is torch.ops.aten.reshape.default:
        e.values[users[0]] = out  # the reshape that always follows is what the operator gives already
        return out
    return reshape(e, out, -1, q_heads, value_width)


def packed_gated_activation(e: Emitter, node: fx.Node) -> str:
    gate_up, activation = node.args
    kind = {"silu": 0, "gelu_tanh": 1}[activation]  # type: ignore[index]
    return e.op("GatedActivation", e.tensor(gate_up), domain=NATIVE, activation=kind)


NATIVE_RULES: dict[Any, Rule] = {
    torch.ops.llmbuild_cpu.packed_attention.default: Rule(packed_attention),
    torch.ops.llmbuild_cpu.packed_gated_activation.default: Rule(packed_gated_activation),
}
