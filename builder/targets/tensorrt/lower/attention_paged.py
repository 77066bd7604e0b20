"""Attention of the full TensorRT: one node that `surgery.py` turns into the PagedAttention plugin.

PagedAttention (domain llmbuild)
    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], keys.l [slots, Hkv, D], values.l [slots, Hkv, Dv],
    slot_mapping [T], block_tables [B, blocks], seq_lens [B], cu_q_lens [B + 1] (int32),
        sinks [Hq], alibi_slopes [Hq] (float32, either may be absent)
    -> [T, Hq, Dv]; keys.l and values.l are written in place
"""

from __future__ import annotations

import torch
from onnx import TensorProto
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype, size
from llmbuild.builder.targets.onnx_graph.emitter import ONNX_TYPES, Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule, operand

DOMAIN = "llmbuild"


def attention(e: Emitter, node: fx.Node) -> str:
    q, k, v, layer, scale, window, softcap, sinks, slopes, *_ = arguments(node)
    pools = [
        e.add_input(f"{name}.{layer}", ONNX_TYPES[dtype(new)], ["slots", int(size(new)[1]), int(size(new)[2])])
        for name, new in (("keys", k), ("values", v))
    ]
    paging = [
        e.add_input("slot_mapping", TensorProto.INT32, ["T"]),
        e.add_input("block_tables", TensorProto.INT32, ["B", "blocks"]),
        e.add_input("seq_lens", TensorProto.INT32, ["B"]),
        e.add_input("cu_q_lens", TensorProto.INT32, ["B+1"]),
    ]
    extras = ["" if extra is None else operand(e, extra, torch.float32) for extra in (sinks, slopes)]
    return e.op(
        "PagedAttention",
        *(e.tensor(x) for x in (q, k, v)),
        *pools,
        *paging,
        *extras,
        domain=DOMAIN,
        layer=layer,
        q_heads=int(size(q)[1]),
        kv_heads=int(size(k)[1]),
        key_width=int(size(k)[2]),
        value_width=int(size(v)[2]),
        block_size=e.limits.block_size,
        scale=float(scale),
        window=int(window or 0),
        softcap=float(softcap or 0.0),
    )


def no_scales(node: fx.Node) -> str | None:
    k_scale = arguments(node)[9] if len(arguments(node)) > 9 else None
    return None if k_scale is None else "a KV cache in 8 bits"


RULE = Rule(attention, no_scales)
