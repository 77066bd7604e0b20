"""Writes the keys and values of a step to the paged pools of a layer."""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.engine.expressions import cdiv
from llmbuild.plugins.kernels.float8 import float32_to_e4m3
from llmbuild.plugins.kernels.spec import POINTER_TYPES, Constant, KernelSpec, pointers

FLOATS = ("float32", "float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"


@triton.jit
def kv_store(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    k_scale,
    v_scale,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Row slots[t] of the pools = row t of k and v; rows with a negative slot are left out.

    k [T, K_WIDTH] with K_STRIDE elements from row to row, v alike; pools [slots, WIDTH]; slots int32 [T]. A row is all
    heads of a token: WIDTH = heads * size of a head. SCALED: pools hold e4m3 bytes of value / scale.
    Grid: (T, parts of k + parts of v), a part being BLOCK elements of a row.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)  # slot * WIDTH passes 2**31 in pools of a few GiB
    K_PARTS: tl.constexpr = (K_WIDTH + BLOCK - 1) // BLOCK
    if slot >= 0:
        if part < K_PARTS:
            copy_part(k + token * K_STRIDE, k_pool + slot * K_WIDTH, k_scale, part, K_WIDTH, BLOCK, SCALED)
        else:
            copy_part(v + token * V_STRIDE, v_pool + slot * V_WIDTH, v_scale, part - K_PARTS, V_WIDTH, BLOCK, SCALED)


@triton.jit
def copy_part(source, target, scale, part, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(source + columns, mask=inside)
    if SCALED:
        tl.store(target + columns, float32_to_e4m3(tl.div_rn(x.to(tl.float32), scale)), mask=inside)
    else:
        tl.store(target + columns, x.to(target.dtype.element_ty), mask=inside)


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
        pool_dtype: One of FLOATS, or FLOAT8: pools of bytes; then k_scale and v_scale are passed at launch.
        k_stride: Elements from one token's keys to the next's: more than a row where k is part of a wider projection.
        v_stride: The same for values.
    """
    if dtype not in FLOATS or pool_dtype not in (*FLOATS, FLOAT8):
        raise ValueError(f"kv_store from {dtype} to {pool_dtype}")
    scaled = pool_dtype == FLOAT8
    pool = "*u8" if scaled else POINTER_TYPES[pool_dtype]
    source = POINTER_TYPES[dtype]
    signature = {"k": source, "v": source, "k_pool": pool, "v_pool": pool, "slots": "*i32"}
    constants = constants_for(num_kv_heads * head_dim, num_kv_heads * v_head_dim, k_stride, v_stride, scaled)
    if scaled:
        signature |= {"k_scale": "fp32", "v_scale": "fp32"}
    else:
        constants |= {"k_scale": None, "v_scale": None}
    return KernelSpec(
        name=name,
        function=kv_store,
        signature=signature,
        constants=constants,
        divisible_by_16=pointers(signature),
        grid=("T", str(parts(constants)), "1"),
        num_warps=4,
        num_stages=1,
    )


def constants_for(k_width: int, v_width: int, k_stride: int, v_stride: int, scaled: bool) -> dict[str, Constant]:
    """The constants of `kv_store` for rows of these widths and strides, in elements."""
    block = min(1024, triton.next_power_of_2(max(k_width, v_width)))
    widths = {"K_WIDTH": k_width, "V_WIDTH": v_width, "K_STRIDE": k_stride, "V_STRIDE": v_stride}
    return {**widths, "BLOCK": block, "SCALED": scaled}


def parts(constants: dict[str, Constant]) -> int:
    """Programs along the grid's second axis."""
    k_width, v_width, block = (int(constants[name] or 0) for name in ("K_WIDTH", "V_WIDTH", "BLOCK"))
    return cdiv(k_width, block) + cdiv(v_width, block)
