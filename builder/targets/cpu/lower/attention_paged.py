"""Attention through the native operator: block tables as they are, K and V appended in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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


def scale_names(layer: int) -> tuple[str, str]:
    return f"key_scales.{layer}", f"value_scales.{layer}"


def why_not_paged(layers: tuple[LayerKV, ...]) -> str | None:
    """Return why the native operator cannot serve these layers, or None."""
    for index, layer in enumerate(layers):
        for width in (layer.head_dim, layer.v_head_dim):
            why = why_not_width(width)
            if why is not None:
                return f"layer {index} has {why}"
    return None


def why_not_width(width: int) -> str | None:
    known = f"multiples of 8 up to {MAX_WIDTH} are known"
    return f"heads of {width} channels ({known})" if width % 8 or width > MAX_WIDTH else None


def emit(
    e: Emitter,
    tensors: Sequence[str],
    *,
    interleaved: bool,
    heads: tuple[int, int],
    widths: tuple[int, int],
    rest: tuple[Any, ...],
    int8: bool,
) -> str:
    """Append PagedAttention, or PagedAttentionInt8, and return its [T, Hq·Dv].

    Args:
        tensors: q (or q|k|v), k, v, cos, sin; absent ones are "".
        rest: What follows q, k, v in `llmbuild::paged_attention`.
        int8: Whether the pools are, with pools of scales beside them.
    """
    layer, scale, window, softcap, sinks, slopes, *_ = rest
    keys, values = pool_names(layer)
    dtype = TensorProto.INT8 if int8 else TensorProto.FLOAT
    e.add_input(keys, dtype, ["slots", heads[1] * widths[0]])
    e.add_input(values, dtype, ["slots", heads[1] * widths[1]])
    scales = [e.add_input(name, TensorProto.FLOAT, ["slots", heads[1]]) for name in scale_names(layer) if int8]
    paging = [
        e.add_input("slot_mapping", TensorProto.INT32, ["T"]),
        e.add_input("block_tables", TensorProto.INT32, ["B", "blocks"]),
        e.add_input("seq_lens", TensorProto.INT32, ["B"]),
        e.add_input("cu_q_lens", TensorProto.INT32, ["B+1"]),
    ]
    optional = ["" if extra is None else e.tensor(extra) for extra in (sinks, slopes)]
    return e.op(
        "PagedAttentionInt8" if int8 else "PagedAttention",
        *(*tensors, keys, values, *paging, *optional, *scales),
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


def attention(e: Emitter, node: fx.Node, *, int8: bool = False) -> str:
    q, k, v, *rest = arguments(node)
    heads = int(size(q)[1]), int(size(k)[1])
    widths = int(size(k)[2]), int(size(v)[2])
    flat = [reshape(e, e.tensor(x), -1, int(size(x)[1]) * int(size(x)[2])) for x in (q, k, v)]
    out = emit(e, [*flat, "", ""], interleaved=False, heads=heads, widths=widths, rest=tuple(rest), int8=int8)
    return reshape(e, out, -1, heads[0], widths[1])


def packed_attention(e: Emitter, node: fx.Node) -> str:
    qkv, cos, sin, interleaved, q_heads, kv_heads, key_width, value_width, *rest, int8 = arguments(node)
    tables = ["" if table is None else e.tensor(table) for table in (cos, sin)]
    out = emit(
        e,
        [e.tensor(qkv), "", "", *tables],
        interleaved=interleaved,
        heads=(q_heads, kv_heads),
        widths=(key_width, value_width),
        rest=tuple(rest),
        int8=int8,
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
    torch.ops.llmbuild_cpu.paged_attention_int8.default: Rule(partial(attention, int8=True)),
    torch.ops.llmbuild_cpu.packed_attention.default: Rule(packed_attention),
    torch.ops.llmbuild_cpu.packed_gated_activation.default: Rule(packed_gated_activation),
}
