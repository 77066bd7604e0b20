"""Takes the queries and keys of a fused projection apart and turns them by their positions (`llmbuild::rope`)."""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.spec import POINTER_TYPES, KernelSpec, arguments_of, pointers


@triton.jit
def split_rotate(
    qkv,
    cos,
    sin,
    q,
    k,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, h): head h of token t, those of the queries first.

    qkv [T, STRIDE] begins with HEADS + KV_HEADS heads; q [T, HEADS, HEAD_DIM], k [T, KV_HEADS, HEAD_DIM]. The first
    ROTARY channels are turned: cos and sin [T, ROTARY / 2], pairs (i, i + ROTARY / 2), or (2i, 2i + 1) if INTERLEAVED.
    Computed in float32 and rounded once.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channels = tl.arange(0, BLOCK)
    inside = channels < HEAD_DIM
    source = qkv + token * STRIDE + head * HEAD_DIM
    x = tl.load(source + channels, mask=inside, other=0.0)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        turned = channels < ROTARY
        if INTERLEAVED:
            partner = channels ^ 1
            pair = channels // 2
            first = channels % 2 == 0
        else:
            partner = tl.where(channels < HALF, channels + HALF, channels - HALF)
            pair = channels % HALF
            first = channels < HALF
        other = tl.load(source + partner, mask=turned, other=0.0).to(tl.float32)
        c = tl.load(cos + token * HALF + pair, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + token * HALF + pair, mask=turned, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * c + tl.where(first, -other, other) * s).to(x.dtype)
    if head < HEADS:
        tl.store(q + (token * HEADS + head) * HEAD_DIM + channels, x, mask=inside)
    else:
        tl.store(k + (token * KV_HEADS + head - HEADS) * HEAD_DIM + channels, x, mask=inside)


def split_rotate_spec(
    name: str,
    *,
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    stride: int,
    rotary_dim: int,
    interleaved: bool,
) -> KernelSpec:
    """Return the spec for one geometry. stride: numbers in a row of qkv. rotary_dim: even, 0 to turn nothing."""
    names = ("qkv", "cos", "sin", "q", "k") if rotary_dim else ("qkv", "q", "k")
    types = dict.fromkeys(names, POINTER_TYPES[dtype])
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "STRIDE": stride,
        "ROTARY": rotary_dim,
        "INTERLEAVED": interleaved,
        "BLOCK": triton.next_power_of_2(head_dim),
    }
    given = arguments_of(split_rotate, types, constants)
    # A row starts at a multiple of 16 bytes only where its width is one: the base of qkv always does.
    given["divisible_by_16"] = pointers(given["signature"])
    return KernelSpec(name, split_rotate, **given, grid=("T", str(heads + kv_heads), "1"), num_warps=1, num_stages=1)
