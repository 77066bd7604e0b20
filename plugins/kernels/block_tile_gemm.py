"""Rows times a block-quantized weight matrix on tensor cores: the weights of a step become x's dtype on their way.

With few rows it is the twin of `tile_gemm`, K split among programs where tiles are few. With many, each row of tiles
reads the weights once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.plugins.kernels.block_layout import UNIT_BYTES, BlockShape
from llmbuild.plugins.kernels.block_step import add_step, columns_of, load_x
from llmbuild.plugins.kernels.gemm_shape import (
    VECTOR_BYTES,
    GemmShape,
    SmallKernel,
    power_of_2,
    splits_for,
    stages_for,
)
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of
from llmbuild.plugins.kernels.tile_gemm import sum_kernel
from llmbuild.plugins.kernels.weight_tile import prefetch_rows


@triton.jit(do_not_specialize=["rows", "x_stride", "out_stride"])
def block_tile_gemm(
    x,
    w,
    w_scale,
    w_offset,
    bias,
    out,
    partial,
    rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, BLOCK_N), SPLITS, cdiv(rows, BLOCK_M)). x [rows, K] with x_stride, a multiple of X_ALIGN, out
    [rows, N] with out_stride, a multiple of OUT_ALIGN.

    w uint8 [N, units of a row * 16], w_scale and w_offset [N, blocks]. UNITS: of each row in a step.
    SPLITS > 1: rows <= BLOCK_M; writes float32 partial [SPLITS, BLOCK_M, N] and no out.
    SWAP: the weights are the left operand, which tensor cores take from registers.
    """
    VALUES: tl.constexpr = 128 // BITS
    ROW_UNITS: tl.constexpr = (K + VALUES - 1) // VALUES
    STEPS: tl.constexpr = (ROW_UNITS + UNITS - 1) // UNITS
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS * UNITS
    BLOCKS: tl.constexpr = (K + BLOCK_SIZE - 1) // BLOCK_SIZE
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        row = tl.minimum(row, N - 1 - first)  # rows past the last are this one once more
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (m < rows)[:, None]
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, ROW_UNITS)
    w += first.to(tl.int64) * (ROW_UNITS * 16)
    w_scale += first.to(tl.int64) * BLOCKS
    if w_offset is not None:
        w_offset += first.to(tl.int64) * BLOCKS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if begin < end:
            prefetch_rows(w, row, begin * 16, end * 16, ROW_UNITS * 16, 1, 4)
        tl.extra.cuda.gdc_wait()

    column = columns_of(BITS, UNITS)
    x_rows = x + m.to(tl.int64)[:, None] * (x_stride // X_ALIGN * X_ALIGN)
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, UNITS):
        k = start * VALUES + column
        x_low = load_x(x_rows, k, live, K, UNITS * VALUES)
        x_high = x_low
        if BITS == 4:
            x_high = load_x(x_rows, k + 16, live, K, UNITS * VALUES)
        acc = add_step(
            acc, x_low, x_high, w, w_scale, w_offset, row, start, K, BITS, BLOCK_SIZE, ZERO, UNITS, BLOCK_N, SWAP
        )
    if SWAP:
        acc = tl.trans(acc)

    n = first + tl.arange(0, BLOCK_N)
    mask = live & (n < N)[None, :]
    if SPLITS == 1:
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N).to(tl.float32)[None, :]
        places = out + m.to(tl.int64)[:, None] * (out_stride // OUT_ALIGN * OUT_ALIGN) + n[None, :]
        tl.store(places, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + (split * BLOCK_M + m[:, None]) * N + n[None, :], acc, mask=mask)


@dataclass(frozen=True)
class BlockTileTiling:
    """A program's tile [block_m, block_n], units of a step, programs that share K; swap: see the kernel."""

    block_m: int
    block_n: int
    units: int
    splits: int
    num_warps: int
    num_stages: int
    swap: bool = False


def block_tile_tiling(shape: GemmShape, block: BlockShape, sm: int, most_rows: int | None) -> BlockTileTiling:
    """Return the tiling of a shape, for few rows or any number (None)."""
    row_units = block.units(shape.k)
    if most_rows is None:
        block_m, block_n, columns, warps, programs = 128, 128, 64, 8, 1
    else:
        block_m, block_n, columns, warps, programs = most_rows, 32 if most_rows <= 16 else 64, 128, 4, 2
    columns = columns * 2 // shape.x_bytes
    units = max(1, min(columns // block.values, power_of_2(row_units)))
    splits = 1
    if most_rows is not None:
        tiles, steps = -(-shape.n // block_n), -(-row_units // units)
        splits = splits_for(tiles, steps, row_units * UNIT_BYTES, most_rows, sm)
    step_bytes = units * (block_n * UNIT_BYTES + block_m * block.values * shape.x_bytes)
    stages = min(stages_for(step_bytes, sm, programs), 4 if most_rows is None else 6)
    return BlockTileTiling(block_m, block_n, units, splits, warps, stages, most_rows is None and sm == 90)


def block_tile_kernel(
    shape: GemmShape,
    block: BlockShape,
    sm: int,
    *,
    name: str,
    most_rows: int | None,
    rows: str = "T",
    tiling: BlockTileTiling | None = None,
    pdl: bool = False,
) -> SmallKernel:
    """Return the kernels for at most `most_rows` rows, or any number: `rows` says it (an expression), for the grid."""
    tiling = tiling or block_tile_tiling(shape, block, sm, most_rows)
    types = shape.types(sm) | block.types()
    alone = tiling.splits == 1
    absent = {"partial"} if alone else {"bias", "out", "out_stride"}
    constants = shape.constants() | block.constants(shape.k)
    constants |= {
        "X_ALIGN": VECTOR_BYTES // shape.x_bytes,
        "OUT_ALIGN": shape.out_align,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "UNITS": tiling.units,
        "SPLITS": tiling.splits,
        "SWAP": tiling.swap,
        "PDL": pdl,
    }
    row_tiles = "1" if most_rows is not None else f"cdiv({rows}, {tiling.block_m})"
    tiles = KernelSpec(
        name,
        block_tile_gemm,
        **arguments_of(block_tile_gemm, {key: types[key] for key in types.keys() - absent}, constants),
        grid=(str(-(-shape.n // tiling.block_n)), str(tiling.splits), row_tiles),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        options={"launch_pdl": True} if pdl else {},
    )
    if alone:
        return SmallKernel(most_rows, (tiles,))
    plain = {key: kind for key, kind in types.items() if key != "w_scale"}  # the sums hold the scales
    sums, workspaces = sum_kernel(shape, plain, name=name, block_m=tiling.block_m, splits=tiling.splits, pdl=pdl)
    return SmallKernel(most_rows, (tiles, sums), workspaces)
