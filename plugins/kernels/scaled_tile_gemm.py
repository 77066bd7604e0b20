"""Any number of rows of 8-bit numbers times a weight matrix of such: tiles on tensor cores, scales at the end.

For what the library does not compute: float8 with scales of rows before and after SM 90, blocks, integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.plugins.kernels.gemm_shape import VECTOR_BYTES, GemmShape, SmallKernel, stages_for, step_of
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of
from llmbuild.plugins.kernels.tile_gemm import block_factor


@triton.jit(do_not_specialize=["rows", "x_stride", "out_stride"])
def scaled_tile_gemm(
    x,
    w,
    x_scale,
    w_scale,
    bias,
    out,
    rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(rows, BLOCK_M) * cdiv(N, BLOCK_N),). Arguments as those of `tile_gemm`.

    BAND: rows of tiles that are walked together, column by column, so that they read a part of w while it is in the
    L2 cache:   0 2 4 ..   BAND = 2
                1 3 5 ..
    """
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    top = program // (BAND * TILES_N) * BAND
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - top, BAND)
    inside_band = program % (BAND * TILES_N)
    m = (top + inside_band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = inside_band // height * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        row = tl.minimum(row, N - 1 - first)  # rows past the last are this one once more
    k = tl.arange(0, BLOCK_K)
    x_rows = x + m.to(tl.int64)[:, None] * (x_stride // X_ALIGN * X_ALIGN) + k[None, :]
    w_rows = w + first.to(tl.int64) * K + row[:, None] * K + k[None, :]
    live = (m < rows)[:, None]
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_M, BLOCK_N], SUM if SCALE_COLUMNS is None else tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            w_tile = tl.load(w_rows + start)
            x_tile = tl.load(x_rows + start, mask=live, other=0.0)
        else:
            inside = (start + k < K)[None, :]
            w_tile = tl.load(w_rows + start, mask=inside, other=0.0)
            x_tile = tl.load(x_rows + start, mask=live & inside, other=0.0)
        if SCALE_COLUMNS is None:
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, out_dtype=SUM)
        else:
            factor = block_factor(
                x_scale, w_scale, m, rows, first // SCALE_ROWS, start // SCALE_COLUMNS, K // SCALE_COLUMNS
            )
            acc += tl.dot(x_tile, tl.trans(w_tile), out_dtype=SUM).to(tl.float32) * factor[:, None]
    total = acc.to(tl.float32)
    n = first + tl.arange(0, BLOCK_N)
    if SCALE_COLUMNS is None:
        total *= tl.load(w_scale + n, mask=n < N, other=0.0)[None, :]
        total *= tl.load(x_scale + m, mask=m < rows, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    places = out + m.to(tl.int64)[:, None] * (out_stride // OUT_ALIGN * OUT_ALIGN) + n[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=live & (n < N)[None, :])


@dataclass(frozen=True)
class ScaledTiling:
    """A program's tile and step over K, and rows of tiles that are walked together."""

    block_m: int
    block_n: int
    block_k: int
    band: int
    num_warps: int
    num_stages: int


def scaled_tiling(shape: GemmShape, sm: int) -> ScaledTiling:
    """Return the tiling of a shape."""
    block_m = block_n = 128
    block_k = step_of(shape.k, 128)
    if shape.block is not None:
        block_n, block_k = min(block_n, shape.block[0]), min(block_k, shape.block[1])
    stages = min(4, stages_for(block_k * (block_m + block_n), sm, 1))
    return ScaledTiling(block_m, block_n, block_k, 8, 8, stages)


def scaled_tile_kernel(
    shape: GemmShape, sm: int, *, name: str, rows: str, tiling: ScaledTiling | None = None, pdl: bool = False
) -> SmallKernel:
    """Return the kernel for any number of rows: `rows` says it (an expression), for the grid.

    Raises:
        ValueError: x and w are not both 8-bit numbers, or a block is not made of tiles.
    """
    tiling = tiling or scaled_tiling(shape, sm)
    if shape.x_dtype is None:
        raise ValueError(f"rows of {shape.dtype} have no scales")
    if shape.block is not None and (shape.block[0] % tiling.block_n or shape.block[1] % tiling.block_k):
        raise ValueError(f"blocks of {shape.block} are not made of tiles {tiling}")
    constants = shape.constants() | {
        "X_ALIGN": VECTOR_BYTES,
        "OUT_ALIGN": shape.out_align,
        "SCALE_ROWS": None if shape.block is None else shape.block[0],
        "SCALE_COLUMNS": None if shape.block is None else shape.block[1],
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "BAND": tiling.band,
        "PDL": pdl,
    }
    columns = -(-shape.n // tiling.block_n)
    spec = KernelSpec(
        name,
        scaled_tile_gemm,
        **arguments_of(scaled_tile_gemm, shape.types(sm), constants),
        grid=(f"cdiv({rows}, {tiling.block_m}) * {columns}", "1", "1"),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        options={"launch_pdl": True} if pdl else {},
    )
    return SmallKernel(None, (spec,))
