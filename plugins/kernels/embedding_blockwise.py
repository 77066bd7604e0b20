"""Looks rows up in a block-quantized table (see `block_layout`): `llmbuild::embedding_blockwise` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.block_layout import BlockShape
from llmbuild.plugins.kernels.block_tile import load_scales
from llmbuild.plugins.kernels.gemm_shape import FLOATS, power_of_2
from llmbuild.plugins.kernels.spec import POINTER_TYPES, Constant, KernelSpec, arguments_of

MOST_UNITS = 128  # of a program


@triton.jit
def embedding_blockwise(
    ids,
    w,
    w_scale,
    w_offset,
    out,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    UNITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = row ids[t] of the table. Grid: (T, parts), a part being UNITS units of a row.

    ids int32 [T], w uint8 [rows, units of a row * 16], w_scale and w_offset [rows, blocks], out [T, K].
    """
    VALUES: tl.constexpr = 128 // BITS
    ROW_UNITS: tl.constexpr = (K + VALUES - 1) // VALUES
    BLOCKS: tl.constexpr = (K + BLOCK_SIZE - 1) // BLOCK_SIZE
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)[:, None]
    byte = tl.arange(0, 16)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(ids + token).to(tl.int64)
    w_scale += row * BLOCKS
    if w_offset is not None:
        w_offset += row * BLOCKS
    units = tl.load(w + row * (ROW_UNITS * 16) + unit * 16 + byte, mask=unit < ROW_UNITS, other=0)
    low = units if BITS == 8 else units & 15
    store_half(w_scale, w_offset, out + token * K, low, unit * VALUES, byte, K, BLOCK_SIZE, ZERO)
    if BITS == 4:
        store_half(w_scale, w_offset, out + token * K, units >> 4, unit * VALUES + 16, byte, K, BLOCK_SIZE, ZERO)


@triton.jit
def store_half(w_scale, w_offset, out, q, first, byte, K: tl.constexpr, BLOCK_SIZE: tl.constexpr, ZERO: tl.constexpr):
    """Store values q, uint8 [units, 16], of the columns from `first`, int [units, 1], on: all of one block."""
    values = load_scales(w_scale, 0, first, first < K, K, BLOCK_SIZE) * (q.to(tl.float32) - ZERO)
    if w_offset is not None:
        values += load_scales(w_offset, 0, first, first < K, K, BLOCK_SIZE)
    tl.store(out + first + byte, values.to(out.dtype.element_ty), mask=first + byte < K)


def embedding_blockwise_spec(name: str, block: BlockShape, *, k: int, dtype: str, pdl: bool = False) -> KernelSpec:
    """Return the spec for rows of k columns in `dtype`, one of FLOATS.

    Raises:
        ValueError: Another dtype, or blocks are not of a size that kernels read.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(FLOATS)}")
    units = min(MOST_UNITS, power_of_2(block.units(k)))
    constants: dict[str, Constant] = {"K": k, **block.constants(k), "UNITS": units, "PDL": pdl}
    types = block.types() | {"ids": "*i32", "out": POINTER_TYPES[dtype]}
    return KernelSpec(
        name,
        embedding_blockwise,
        **arguments_of(embedding_blockwise, types, constants),
        grid=("T", str(-(-block.units(k) // units)), "1"),
        num_warps=max(1, min(4, units // 32)),
        num_stages=1,
        options={"launch_pdl": True} if pdl else {},
    )
