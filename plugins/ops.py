"""Canonical ops of the graph: schema, fake and plain reference of each.

Importing this module registers `torch.ops.llmbuild.*`. All ops are functional and token-major: the last axes are
`[..., T, H, D]` (heads) or `[..., T, C]` (channels); a leading batch axis of 1, left over from tracing, is allowed.

The references are the oracle: written for clarity, in the dtype of their inputs (statistics in float32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmbuild.plugins import attention_reference, cache_rounding, moe_reference

LIB = torch.library.Library("llmbuild", "DEF")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")


def _define(schema: str) -> None:
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


# --------------------------------------------------------------------------------------------- paged attention
_define(
    "paged_attention(Tensor q, Tensor k, Tensor v, int layer, float scale, int? window=None, float? softcap=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor"
)
# q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv]. Causal. Appends k and v to the KV cache of `layer`, then
# attends over it; the cache and the batch's block tables are implicit state (attention_reference.PagedState).
# window: a query at position p sees positions p - window + 1 .. p. softcap: scores become softcap * tanh(s / softcap).
# sinks [Hq]: one more logit per head that takes probability and adds no value. alibi_slopes [Hq]: scores get
# slope * (key position - query position).
# k_scale, v_scale: what the numbers of a cache in 8 bits are multiplied with, of cache_fp8 (k uint8, float32 [1]) or of
# cache_int8 (k int8, float32 [T, Hkv, 1], appended beside k).


@torch.library.register_fake("llmbuild::paged_attention")
def _(q, k, v, layer, scale, window=None, softcap=None, sinks=None, alibi_slopes=None, k_scale=None, v_scale=None):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.impl("llmbuild::paged_attention", ("cpu", "cuda"))
def _(q, k, v, layer, scale, window=None, softcap=None, sinks=None, alibi_slopes=None, k_scale=None, v_scale=None):
    rules = {"window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
    state = attention_reference.current_state()
    return state.attend(q, k, v, layer, scale, **rules, k_scale=k_scale, v_scale=v_scale)


_define("cache_fp8(Tensor x, Tensor scale) -> Tensor")
# x [T, H, D], scale float32 [1] -> uint8 [T, H, D], bits of e4m3: see cache_rounding.
torch.library.impl("llmbuild::cache_fp8", "CompositeExplicitAutograd")(cache_rounding.round_fp8)
torch.library.register_fake("llmbuild::cache_fp8")(lambda x, scale: x.new_empty(x.shape, dtype=torch.uint8))

_define("cache_int8(Tensor x) -> (Tensor, Tensor)")
# x [T, H, D] -> int8 [T, H, D], float32 [T, H, 1], the scales: see cache_rounding.
torch.library.impl("llmbuild::cache_int8", "CompositeExplicitAutograd")(cache_rounding.round_int8)


@torch.library.register_fake("llmbuild::cache_int8")
def _(x):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


# ------------------------------------------------------------------------------------------------------- norms
_define("rms_norm(Tensor x, Tensor? weight, float eps, bool round_before_weight=False) -> Tensor")
# y = x * rsqrt(mean(x², -1) + eps) * weight, computed in float32. round_before_weight: the normalised value is cast
# to x's dtype before it is multiplied (Llama), else after (Gemma); the two differ in bfloat16.


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool = False) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return h.to(x.dtype)
    if round_before_weight:
        return (weight * h.to(x.dtype)).to(x.dtype)
    return (h * weight.float()).to(x.dtype)


torch.library.impl("llmbuild::rms_norm", "CompositeExplicitAutograd")(rms_norm)
torch.library.register_fake("llmbuild::rms_norm")(lambda x, *a, **k: torch.empty_like(x))

_define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool round_before_weight=False) "
    "-> (Tensor, Tensor)"
)
# s = x + residual; returns (rms_norm(s), s).


@torch.library.impl("llmbuild::add_rms_norm", "CompositeExplicitAutograd")
def _(x, residual, weight, eps, round_before_weight=False):
    total = x + residual
    return rms_norm(total, weight, eps, round_before_weight), total


@torch.library.register_fake("llmbuild::add_rms_norm")
def _(x, residual, weight, eps, round_before_weight=False):
    return torch.empty_like(x), torch.empty_like(x)


# -------------------------------------------------------------------------------------------------------- rope
_define("rope(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor")
# x [..., T, H, D], cos and sin [..., T, R/2] with R <= D: the first R channels of every head are rotated, the rest
# pass. Half layout: pairs (i, i + R/2); interleaved: pairs (2i, 2i + 1). (a, b) -> (a·cos - b·sin, b·cos + a·sin).


@torch.library.impl("llmbuild::rope", "CompositeExplicitAutograd")
def _(x, cos, sin, interleaved=False):
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((out, rest), dim=-1).to(x.dtype)


torch.library.register_fake("llmbuild::rope")(lambda x, *a, **k: torch.empty_like(x))

# --------------------------------------------------------------------------------------------- gated activation
_define("gated_activation(Tensor gate, Tensor up, str activation) -> Tensor")
# y = activation(gate) * up, elementwise; activation is one of ACTIVATIONS.


def activate(x: Tensor, activation: str) -> Tensor:
    functional = torch.nn.functional
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if activation == "relu":
        return functional.relu(x)
    if activation == "relu2":
        return functional.relu(x).square()
    if activation == "sigmoid":
        return torch.sigmoid(x)
    raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")


@torch.library.impl("llmbuild::gated_activation", "CompositeExplicitAutograd")
def _(gate, up, activation):
    return activate(gate, activation) * up


torch.library.register_fake("llmbuild::gated_activation")(lambda gate, up, activation: torch.empty_like(gate))

# ------------------------------------------------------------------------------------------- block-quantized weights
_define(
    "linear_blockwise(Tensor x, Tensor q, Tensor scale, Tensor? offset, Tensor? bias, int bits, int block_size, "
    "int zero) -> Tensor"
)
# y = x @ Wᵀ + bias with W[n, k] = scale[n, k // block_size] * (q[n, k] - zero) + offset[n, k // block_size].
# q uint8 [N, K] (one value a byte, < 2**bits); scale, offset float32 [N, ceil(K / block_size)]. Targets pack q as they
# like. `zero` serves symmetric formats, `offset` those with a minimum; both at once are legal.


def dequantize_blockwise(q: Tensor, scale: Tensor, offset: Tensor | None, block_size: int, zero: int) -> Tensor:
    """Return the float32 [N, K] weight that `q`, `scale` and `offset` stand for."""
    columns = q.shape[-1]
    expand = lambda t: t.repeat_interleave(block_size, dim=-1)[..., :columns]  # noqa: E731
    weight = expand(scale.float()) * (q.float() - zero)
    return weight if offset is None else weight + expand(offset.float())


@torch.library.impl("llmbuild::linear_blockwise", "CompositeExplicitAutograd")
def _(x, q, scale, offset, bias, bits, block_size, zero):
    weight = dequantize_blockwise(q, scale, offset, block_size, zero).to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


@torch.library.register_fake("llmbuild::linear_blockwise")
def _(x, q, scale, offset, bias, bits, block_size, zero):
    return x.new_empty(*x.shape[:-1], q.shape[0])


_define(
    "embedding_blockwise(Tensor ids, Tensor q, Tensor scale, Tensor? offset, int bits, int block_size, int zero, "
    "ScalarType dtype) -> Tensor"
)
# Row lookup in a block-quantized table (same layout as linear_blockwise): ids [...] -> [..., K] in `dtype`.


@torch.library.impl("llmbuild::embedding_blockwise", "CompositeExplicitAutograd")
def _(ids, q, scale, offset, bits, block_size, zero, dtype):
    flat = ids.reshape(-1).long()
    rows = dequantize_blockwise(q[flat], scale[flat], None if offset is None else offset[flat], block_size, zero)
    return rows.reshape(*ids.shape, -1).to(dtype)


@torch.library.register_fake("llmbuild::embedding_blockwise")
def _(ids, q, scale, offset, bits, block_size, zero, dtype):
    return scale.new_empty(*ids.shape, q.shape[1], dtype=dtype)


# ----------------------------------------------------------------------------------------------- mixture of experts
_EXPERTS = "str activation, bool gated=True, float slope=1.0, float? limit=None, float shift=0.0"
_define(
    "moe_experts(Tensor x, Tensor ids, Tensor scores, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, "
    f"{_EXPERTS}) -> Tensor"
)
# x [T, H], ids [T, K], scores [T, K], up [E, 2I, H] (gate rows first; [E, I, H] when not gated), down [E, H, I],
# biases [E, 2I] or [E, I] and [E, H] -> [T, H]. y[t] = Σ_k scores[t, k]·expert ids[t, k] of x[t]; see moe_reference.


@torch.library.impl("llmbuild::moe_experts", "CompositeExplicitAutograd")
def _(x, ids, scores, up, down, up_bias, down_bias, activation, gated=True, slope=1.0, limit=None, shift=0.0):
    kind = (activation, gated, slope, limit, shift)
    return moe_reference.experts(x, ids, scores, up, down, up_bias, down_bias, *kind)


torch.library.register_fake("llmbuild::moe_experts")(lambda x, *a, **k: torch.empty_like(x))

_define("expert_rows(Tensor w, bool transposed, bool interleaved) -> Tensor")
# The layout of `moe_experts` from those that models use: w [.., N, K], or [.., K, N] when transposed; with interleaved,
# rows gate 0, up 0, gate 1, up 1, ... become all of gate before all of up.


@torch.library.impl("llmbuild::expert_rows", "CompositeExplicitAutograd")
def _(w, transposed, interleaved):
    w = w.transpose(-1, -2) if transposed else w
    return (torch.cat((w[..., 0::2, :], w[..., 1::2, :]), dim=-2) if interleaved else w).contiguous()


@torch.library.register_fake("llmbuild::expert_rows")
def _(w, transposed, interleaved):
    return w.new_empty(w.transpose(-1, -2).shape if transposed else w.shape)


_define(
    "moe_experts_blockwise(Tensor x, Tensor ids, Tensor scores, Tensor up_q, Tensor up_scale, Tensor? up_offset, "
    "int[] up_form, Tensor down_q, Tensor down_scale, Tensor? down_offset, int[] down_form, Tensor? up_bias, "
    f"Tensor? down_bias, {_EXPERTS}) -> Tensor"
)
# moe_experts over block-quantized weights: the experts' rows below each other, q [E·2I, H] and [E·H, I] with scale and
# offset as in linear_blockwise; a form is (experts, bits, block_size, zero).


@torch.library.impl("llmbuild::moe_experts_blockwise", "CompositeExplicitAutograd")
def _(x, ids, scores, up_q, up_scale, up_offset, up_form, down_q, down_scale, down_offset, down_form, *rest, **named):
    up = dequantize_experts(up_q, up_scale, up_offset, up_form).to(x.dtype)
    down = dequantize_experts(down_q, down_scale, down_offset, down_form).to(x.dtype)
    return torch.ops.llmbuild.moe_experts(x, ids, scores, up, down, *rest, **named)


def dequantize_experts(q: Tensor, scale: Tensor, offset: Tensor | None, form: list[int]) -> Tensor:
    """Return the float32 [E, N, K] weight of blocks whose form is (experts, bits, block_size, zero)."""
    experts, _, block_size, zero = form
    return dequantize_blockwise(q, scale, offset, block_size, zero).unflatten(0, (experts, -1))


torch.library.register_fake("llmbuild::moe_experts_blockwise")(lambda x, *a, **k: torch.empty_like(x))
