"""Writes the keys and values of a step to pools of bytes, with a scale of its own for each token and head."""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.kv_store import BYTES, store_signature, to_byte
from llmbuild.plugins.kernels.spec import Constant, KernelSpec, pointers

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


@triton.jit
def kv_store_scaled(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    k_scales,
    v_scales,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """pool[slots[t], h] = row [t, h] / scale, scales[slots[t], h] = scale: the row's largest magnitude / LARGEST.

    k [T, HEADS, HEAD_DIM] with K_STRIDE elements from token to token, v [T, HEADS, V_HEAD_DIM] alike; pools
    [slots, HEADS, size]; scales float32 [slots, HEADS]; slots int32 [T], negative: left out. The BLOCKs are the sizes,
    rounded up to powers of 2. Rows that are not finite are zeros with the scale infinity, as in `cache_rounding`.
    Grid: (T, 2), keys and values.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        head = slot * HEADS
        if tl.program_id(1) == 0:
            source, pool, scales = k + token * K_STRIDE, k_pool + head * HEAD_DIM, k_scales + head
            store_heads(source, pool, scales, HEADS, HEAD_DIM, HEADS_BLOCK, K_BLOCK, LARGEST)
        else:
            source, pool, scales = v + token * V_STRIDE, v_pool + head * V_HEAD_DIM, v_scales + head
            store_heads(source, pool, scales, HEADS, V_HEAD_DIM, HEADS_BLOCK, V_BLOCK, LARGEST)


@triton.jit
def store_heads(
    source,
    pool,
    scales,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    heads = tl.arange(0, HEADS_BLOCK)
    columns = tl.arange(0, BLOCK)
    inside = (heads[:, None] < HEADS) & (columns[None, :] < SIZE)
    offsets = heads[:, None] * SIZE + columns[None, :]
    x = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    magnitude = tl.where(x == x, tl.abs(x), float("inf"))  # a maximum passes over NaN
    scale = tl.div_rn(tl.max(magnitude, axis=1), LARGEST)
    usable = (scale > 0.0) & (scale < float("inf"))  # a row of zeros: scale 0, numbers 0
    divisor = tl.where(usable, scale, 1.0)
    numbers = tl.where(usable[:, None], tl.div_rn(x, divisor[:, None]), 0.0)
    tl.store(pool + offsets, to_byte(numbers, pool), mask=inside)
    tl.store(scales + heads, scale, mask=heads < HEADS)


def kv_store_scaled_spec(
    name: str,
    *,
    dtype: str,
    pool_dtype: str,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    k_stride: int,
    v_stride: int,
) -> KernelSpec:
    """Return the spec of `kv_store_scaled`; the arguments are those of `kv_store_spec`, pool_dtype one of BYTES."""
    if pool_dtype not in BYTES:
        raise ValueError(f"pools of {pool_dtype} take no scales; {', '.join(BYTES)} do")
    signature = store_signature(dtype, pool_dtype)
    return KernelSpec(
        name=name,
        function=kv_store_scaled,
        signature=signature,
        constants=scaled_constants(pool_dtype, num_kv_heads, head_dim, v_head_dim, k_stride, v_stride),
        divisible_by_16=pointers(signature),
        grid=("T", "2", "1"),
        num_warps=4,
        num_stages=1,
    )


def scaled_constants(
    pool_dtype: str, num_kv_heads: int, head_dim: int, v_head_dim: int, k_stride: int, v_stride: int
) -> dict[str, Constant]:
    """The constants of `kv_store_scaled`."""
    power = triton.next_power_of_2
    return {
        "HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "K_STRIDE": k_stride,
        "V_STRIDE": v_stride,
        "HEADS_BLOCK": power(num_kv_heads),
        "K_BLOCK": power(head_dim),
        "V_BLOCK": power(v_head_dim),
        "LARGEST": LARGEST[pool_dtype],
    }
