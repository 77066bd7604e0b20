"""Kernels that a TensorRT engine stores and launches by itself: with its own order of arguments, and nothing else.

TensorRT gives a kernel the pointers of a node's inputs, then numbers, then the pointers of its outputs. An output that
shares its memory with an input is there twice. A node has one kernel and no workspace, so that a layer is two nodes:

    PagedStore     k v key_pool value_pool slot_mapping                  ->  key_pool value_pool
    PagedAttend    q key_pool value_pool block_tables seq_lens cu_q_lens [sinks] [slopes]  B  ->  out

The second reads the pools that come out of the first, which keeps them in order. Keys are never split among programs:
that takes memory for what the parts found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import triton
import triton.language as tl

from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.plugins.kernels.kv_store import kv_store, kv_store_spec
from llmbuild.plugins.kernels.paged_attention_prefill import (
    PrefillTiling,
    paged_attention_prefill,
    prefill_spec,
    prefill_tiling,
)
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of


@triton.jit
def stored_store(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    k_pool_out,
    v_pool_out,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`kv_store` of a cache without scales. k_pool_out, v_pool_out: where k_pool and v_pool are."""
    kv_store(k, v, k_pool_out, v_pool_out, slots, None, None, K_WIDTH, V_WIDTH, K_STRIDE, V_STRIDE, BLOCK)


@triton.jit(do_not_specialize=["sequences"])
def stored_attend(
    q,
    keys,
    values,
    block_tables,
    seq_lens,
    cu_q_lens,
    sinks,
    slopes,
    sequences,
    out,
    TABLE_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """`paged_attention_prefill` over a cache without scales; its grid. sequences: B."""
    paged_attention_prefill(
        q,
        keys,
        values,
        None,
        None,
        sinks,
        slopes,
        block_tables,
        seq_lens,
        cu_q_lens,
        out,
        TABLE_STRIDE,
        sequences,
        SCALE,
        SOFTCAP,
        WINDOW,
        KV_SCALES,
        PAGE,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        HEAD_BLOCK,
        REST_BLOCK,
        VALUE_BLOCK,
        TILE_HEADS,
        BLOCK_Q,
        ROWS,
        BLOCK_N,
        PDL,
    )


def stored_store_spec(shape: AttentionShape) -> KernelSpec:
    """Return the kernel of PagedStore."""
    plain = kv_store_spec(
        "store",
        dtype=shape.dtype,
        pool_dtype=shape.kv_dtype,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.value_dim,
        k_stride=shape.kv_heads * shape.head_dim,
        v_stride=shape.kv_heads * shape.value_dim,
    )
    pools = {f"{name}_out": plain.signature[name] for name in ("k_pool", "v_pool")}
    return launched_as(plain, "store", stored_store, {**plain.signature, **pools}, {})


def stored_attend_specs(shape: AttentionShape, sm: int, table_stride: int) -> Iterator[KernelSpec]:
    """Yield kernels of PagedAttend, from the fastest tiling to the one that needs the least shared memory."""
    for tiling in smaller_tilings(prefill_tiling(shape, sm)):
        plain = prefill_spec(shape, sm, tiling=tiling)
        yield launched_as(plain, "attend", stored_attend, plain.signature, {"TABLE_STRIDE": table_stride})


def launched_as(
    plain: KernelSpec, name: str, function: Any, signature: Mapping[str, str], more: Mapping[str, Any]
) -> KernelSpec:
    """Return the spec of a function that calls that of `plain`: same grid, warps and constants, and `more` of these."""
    constants = {
        each: value for each, value in plain.constants.items() if each in function.arg_names and value is not None
    }
    return KernelSpec(
        name,
        function,
        **arguments_of(function, signature, {**constants, **more}),
        grid=plain.grid,
        num_warps=plain.num_warps,
        num_stages=plain.num_stages,
    )


def smaller_tilings(most: PrefillTiling) -> Iterator[PrefillTiling]:
    """Yield smaller tilings. One step of keys is copied ahead as long as a tile keeps 64 rows and a step 32 keys."""
    sizes = [(rows, keys) for rows in halves(most.rows) for keys in halves(most.block_n)]
    for stages in (3, 1):
        for rows, keys in sizes:
            if stages == 1 or (rows >= min(64, most.rows) and keys >= min(32, most.block_n)):
                yield PrefillTiling(rows, keys, most.num_warps if rows == most.rows else 4, stages)


def halves(size: int) -> list[int]:
    """64 -> 64, 32, 16: matrix units take no less."""
    return [size >> shift for shift in range(size.bit_length()) if size >> shift >= 16]
