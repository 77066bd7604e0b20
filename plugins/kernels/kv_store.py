"""Writes the keys and values of a step to the paged pools of a layer, as they are or with one scale for the layer."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from llmbuild.engine.expressions import cdiv
from llmbuild.plugins.kernels.float8 import float32_to_e4m3
from llmbuild.plugins.kernels.int8 import float32_to_int8
from llmbuild.plugins.kernels.spec import POINTER_TYPES, Constant, KernelSpec, pointers

FLOATS = ("float32", "float16", "bfloat16")
# Pools of bytes. e4m3 is stored as its bits, uint8: the SMs before 89 have no such type.
BYTES = {"float8_e4m3fn": "*u8", "int8": "*i8"}


@triton.jit
def kv_store(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    k_scales,
    v_scales,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row slots[t] of the pools = row t of k and v; rows with a negative slot are left out.

    k [T, K_WIDTH] with K_STRIDE elements from row to row, v alike; pools [slots, WIDTH]; slots int32 [T]. A row is all
    heads of a token: WIDTH = heads * size of a head. Pools of bytes hold value / scale; scales float32 [1], else None.
    Grid: (T, parts of k + parts of v), a part being BLOCK elements of a row.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)  # slot * WIDTH passes 2**31 in pools of a few GiB
    K_PARTS: tl.constexpr = (K_WIDTH + BLOCK - 1) // BLOCK
    if slot >= 0:
        if part < K_PARTS:
            store_part(k + token * K_STRIDE, k_pool + slot * K_WIDTH, k_scales, part, K_WIDTH, BLOCK)
        else:
            store_part(v + token * V_STRIDE, v_pool + slot * V_WIDTH, v_scales, part - K_PARTS, V_WIDTH, BLOCK)


@triton.jit
def store_part(source, target, scales, part, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(source + columns, mask=inside)
    if scales is None:
        tl.store(target + columns, x.to(target.dtype.element_ty), mask=inside)
    else:
        tl.store(target + columns, to_byte(tl.div_rn(x.to(tl.float32), tl.load(scales)), target), mask=inside)


@triton.jit
def to_byte(x, target):
    """float32 -> the 8-bit type of a pool, e4m3 in a pool of uint8."""
    if target.dtype.element_ty == tl.uint8:
        byte = float32_to_e4m3(x)
    else:
        byte = float32_to_int8(x)
    return byte


def kv_store_spec(
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
    """Return the spec of `kv_store` for one geometry.

    Args:
        name: The kernel's name in the engine.
        dtype: That of k and v, one of FLOATS.
        pool_dtype: One of FLOATS, or of BYTES: then k_scales and v_scales are passed at launch.
        k_stride: Elements from one token's keys to the next's: more than a row where k is part of a wider projection.
        v_stride: The same for values.

    Raises:
        ValueError: No such kernel for these dtypes.
    """
    signature = store_signature(dtype, pool_dtype)
    constants = store_constants(num_kv_heads * head_dim, num_kv_heads * v_head_dim, k_stride, v_stride)
    return KernelSpec(
        name=name,
        function=kv_store,
        signature=signature,
        constants=constants | {scale: None for scale in ("k_scales", "v_scales") if scale not in signature},
        divisible_by_16=pointers(signature),
        grid=("T", str(parts(constants)), "1"),
        num_warps=4,
        num_stages=1,
    )


def store_signature(dtype: str, pool_dtype: str) -> dict[str, str]:
    """The types of what is passed at launch, scales only for pools of bytes; for the errors see `kv_store_spec`."""
    if dtype not in FLOATS or pool_dtype not in (*FLOATS, *BYTES):
        raise ValueError(f"no kernel stores {dtype} keys and values in pools of {pool_dtype}")
    source, pool = POINTER_TYPES[dtype], BYTES.get(pool_dtype, POINTER_TYPES[pool_dtype])
    signature = {"k": source, "v": source, "k_pool": pool, "v_pool": pool, "slots": "*i32"}
    return signature | (dict.fromkeys(("k_scales", "v_scales"), "*fp32") if pool_dtype in BYTES else {})


def store_constants(k_width: int, v_width: int, k_stride: int, v_stride: int) -> dict[str, Constant]:
    """The constants of `kv_store` for rows of these widths and strides, in elements."""
    block = min(1024, triton.next_power_of_2(max(k_width, v_width)))
    return {"K_WIDTH": k_width, "V_WIDTH": v_width, "K_STRIDE": k_stride, "V_STRIDE": v_stride, "BLOCK": block}


def parts(constants: Mapping[str, Constant]) -> int:
    """Programs along the grid's second axis."""
    k_width, v_width, block = (int(constants[name] or 0) for name in ("K_WIDTH", "V_WIDTH", "BLOCK"))
    return cdiv(k_width, block) + cdiv(v_width, block)
