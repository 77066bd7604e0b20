"""Ops that only this target has: fused forms that read one merged linear's output without splitting it.

Importing this module registers `torch.ops.llmbuild_cpu.*`. The references are compositions of the canonical ops, so
the oracle runs a graph after the target's passes too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmbuild.plugins import ops as canonical

LIB = torch.library.Library("llmbuild_cpu", "DEF")

LIB.define(
    "packed_attention(Tensor qkv, Tensor? cos, Tensor? sin, bool interleaved, int q_heads, int kv_heads, "
    "int key_width, int value_width, int layer, float scale, int? window, float? softcap, Tensor? sinks, "
    "Tensor? alibi_slopes, bool int8) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# qkv [T, q_heads·D | kv_heads·D | kv_heads·Dv], cos and sin [T, R/2] or None -> [T, q_heads, Dv]:
# paged_attention(rope(q), rope(k), v), with int8 that of paged_attention_int8.


@torch.library.impl("llmbuild_cpu::packed_attention", "CPU")
def _(qkv, cos, sin, interleaved, q_heads, kv_heads, key_width, value_width, *rest):
    widths = [q_heads * key_width, kv_heads * key_width, kv_heads * value_width]
    q, k, v = (part.unflatten(-1, (-1, width)) for part, width in _split(qkv, widths, key_width, value_width))
    if cos is not None:
        q, k = (torch.ops.llmbuild.rope(x, cos, sin, interleaved) for x in (q, k))
    *others, int8 = rest
    attention = torch.ops.llmbuild_cpu.paged_attention_int8 if int8 else torch.ops.llmbuild.paged_attention
    return attention(q, k, v, *others)


def _split(qkv: Tensor, widths: list[int], key_width: int, value_width: int) -> list[tuple[Tensor, int]]:
    return list(zip(qkv.split(widths, dim=-1), (key_width, key_width, value_width), strict=True))


@torch.library.register_fake("llmbuild_cpu::packed_attention")
def _(qkv, cos, sin, interleaved, q_heads, kv_heads, key_width, value_width, *rest):
    return qkv.new_empty(qkv.shape[0], q_heads, value_width)


LIB.define(
    "paged_attention_int8(Tensor q, Tensor k, Tensor v, int layer, float scale, int? window, float? softcap, "
    "Tensor? sinks, Tensor? alibi_slopes) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# paged_attention(q, a, b, .., s, t) with a, s = cache_int8(k) and b, t = cache_int8(v): rounded where it is appended.


@torch.library.impl("llmbuild_cpu::paged_attention_int8", "CPU")
def _(q, k, v, *rest):
    (k, k_scale), (v, v_scale) = (torch.ops.llmbuild.cache_int8(x) for x in (k, v))
    return torch.ops.llmbuild.paged_attention(q, k, v, *rest, k_scale, v_scale)


@torch.library.register_fake("llmbuild_cpu::paged_attention_int8")
def _(q, k, v, *rest):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


LIB.define("packed_gated_activation(Tensor gate_up, str activation) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
# gate_up [.., 2·F] -> activation(gate)·up [.., F].


@torch.library.impl("llmbuild_cpu::packed_gated_activation", "CompositeExplicitAutograd")
def _(gate_up, activation):
    gate, up = gate_up.chunk(2, dim=-1)
    return canonical.activate(gate, activation) * up


@torch.library.register_fake("llmbuild_cpu::packed_gated_activation")
def _(gate_up, activation):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
