"""A few rows times a weight matrix, on tensor cores: all rows in one tile, so that weights are read once.

Narrow layers have too few tiles for all processors. There K is split among several programs; each leaves its sums in
a workspace, and a second kernel adds them in a fixed order: the same bits each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.plugins.kernels.gemm_shape import (
    FLOATS,
    VECTOR_BYTES,
    GemmShape,
    SmallKernel,
    power_of_2,
    splits_for,
    stages_for,
    step_of,
)
from llmbuild.plugins.kernels.spec import Constant, KernelSpec, arguments_of
from llmbuild.plugins.kernels.weight_tile import LINE, fits, prefetch_rows

SUM_COLUMNS = 512  # of a program that adds partial sums


@triton.jit(do_not_specialize=["rows", "x_stride", "out_stride"])
def tile_gemm(
    x,
    w,
    x_scale,
    w_scale,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    LINES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, BLOCK_N), SPLITS). rows <= BLOCK_M. x [rows, K] with x_stride, a multiple of X_ALIGN, w [N, K],
    out [rows, N] with out_stride, a multiple of OUT_ALIGN.

    SPLITS > 1: writes float32 partial [SPLITS, BLOCK_M, N] and no out; scales and bias are for `sum_partial` then.
    SWAP: the weights are the left operand, whose rows are those of the tensor core's tile.
    LINES: cache lines of each row of w that are asked for before waiting, with PDL.
    SCALE_ROWS, SCALE_COLUMNS: of w that share a scale, multiples of BLOCK_N and BLOCK_K: w_scale [⌈N / rows⌉, ⌈K /
    columns⌉], x_scale [rows, ⌈K / columns⌉]. None: one scale a row, applied at the end.
    """
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        row = tl.minimum(row, N - 1 - first)  # rows past the last are this one once more
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS * BLOCK_K
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, K)
    w += first.to(tl.int64) * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if begin < end:
            prefetch_rows(w, row, begin, end, K, w.dtype.element_ty.primitive_bitwidth // 8, LINES)
        tl.extra.cuda.gdc_wait()

    x_rows = x + (m * (x_stride // X_ALIGN * X_ALIGN))[:, None] + k[None, :]
    w_rows = w + row[:, None] * K + k[None, :]
    live = (m < rows)[:, None]
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], SUM if SCALE_COLUMNS is None else tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], SUM if SCALE_COLUMNS is None else tl.float32)
    for start in range(begin, end, BLOCK_K):
        if K % BLOCK_K == 0:
            w_tile = tl.load(w_rows + start, eviction_policy="evict_first")
            x_tile = tl.load(x_rows + start, mask=live, other=0.0)
        else:
            inside = (start + k < K)[None, :]
            w_tile = tl.load(w_rows + start, mask=inside, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x_rows + start, mask=live & inside, other=0.0)
        if x_tile.dtype == tl.uint8:  # bits of float8, on an SM that does not multiply it
            x_tile = fits(x_tile, tl.float16)
        w_tile = fits(w_tile, x_tile.dtype)
        if SCALE_COLUMNS is not None:
            factor = block_factor(
                x_scale, w_scale, m, rows, first // SCALE_ROWS, start // SCALE_COLUMNS, K // SCALE_COLUMNS
            )
            if SWAP:
                acc += tl.dot(w_tile, tl.trans(x_tile), out_dtype=SUM).to(tl.float32) * factor[None, :]
            else:
                acc += tl.dot(x_tile, tl.trans(w_tile), out_dtype=SUM).to(tl.float32) * factor[:, None]
        elif SWAP:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee", out_dtype=SUM)
        else:
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee", out_dtype=SUM)
    if SWAP:
        acc = tl.trans(acc)
    acc = acc.to(tl.float32)

    n = first + tl.arange(0, BLOCK_N)
    mask = live & (n < N)[None, :]
    if SPLITS == 1:
        if w_scale is not None and SCALE_COLUMNS is None:
            acc *= tl.load(w_scale + n, mask=n < N)[None, :]
        if x_scale is not None and SCALE_COLUMNS is None:
            acc *= tl.load(x_scale + m, mask=m < rows)[:, None]
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N).to(tl.float32)[None, :]
        tl.store(
            out + m[:, None] * (out_stride // OUT_ALIGN * OUT_ALIGN) + n[None, :],
            acc.to(out.dtype.element_ty),
            mask=mask,
        )
    else:
        tl.store(partial + (split * BLOCK_M + m[:, None]) * N + n[None, :], acc, mask=mask)


@triton.jit
def block_factor(x_scale, w_scale, m, rows, row_block, column_block, COLUMNS: tl.constexpr):
    """What the products of a block of the weight count, float32 for each row of x; 0 for rows that are none."""
    of_x = tl.load(x_scale + m * COLUMNS + column_block, mask=m < rows, other=0.0)
    return of_x * tl.load(w_scale + row_block * COLUMNS + column_block)


@triton.jit(do_not_specialize=["rows", "out_stride"])
def sum_partial(
    x_scale,
    w_scale,
    bias,
    out,
    partial,
    rows,
    out_stride,
    N: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, BLOCK_N), BLOCK_M). out[m] = (Σ_s partial[s, m] · scales) + bias, s in order."""
    m = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if m < rows:
        total = tl.zeros([BLOCK_N], tl.float32)
        for split in tl.static_range(SPLITS):
            total += tl.load(partial + (split * BLOCK_M + m) * N + n, mask=n < N, other=0.0)
        if w_scale is not None:
            total *= tl.load(w_scale + n, mask=n < N, other=0.0)
        if x_scale is not None:
            total *= tl.load(x_scale + m)
        if bias is not None:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out + m * (out_stride // OUT_ALIGN * OUT_ALIGN) + n, total.to(out.dtype.element_ty), mask=n < N)


@dataclass(frozen=True)
class TileTiling:
    """A program's tile [block_m, block_n], columns of a step, programs that share K; swap: see the kernel."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    swap: bool = False


def tile_tiling(shape: GemmShape, sm: int, most_rows: int = 16) -> TileTiling:
    """Return the tiling of a shape: narrow tiles, for many programs, each with as many steps on their way as fit."""
    if most_rows <= 16:
        block_n, step_bytes, programs = 32, 256, 3
    else:  # rows of x weigh as much as those of w
        block_n, step_bytes, programs = 64, 128, 2
    block_k = step_of(shape.k, step_bytes // shape.w_bytes)
    if shape.block is not None:
        block_n, block_k = min(block_n, shape.block[0]), min(block_k, shape.block[1])
    tiles, steps = -(-shape.n // block_n), -(-shape.k // block_k)
    splits = splits_for(tiles, steps, shape.k * shape.w_bytes, most_rows, sm)
    loaded = block_k * (block_n * shape.w_bytes + most_rows * shape.x_bytes)
    return TileTiling(most_rows, block_n, block_k, splits, 4, stages_for(loaded, sm, programs))


def tile_kernel(
    shape: GemmShape, sm: int, *, name: str, most_rows: int = 16, tiling: TileTiling | None = None, pdl: bool = False
) -> SmallKernel:
    """Return the kernels for at most `most_rows` (a power of 2 from 16) rows. pdl: as in `row_kernel`."""
    tiling = tiling or tile_tiling(shape, sm, most_rows)
    types = shape.types(sm)
    alone = tiling.splits == 1
    if shape.block is not None and (shape.block[0] % tiling.block_n or shape.block[1] % tiling.block_k):
        raise ValueError(f"blocks of {shape.block} are not made of tiles {tiling}")
    of_sum = {"bias", "out", "out_stride"} | ({"x_scale", "w_scale"} if shape.block is None else set())
    absent = {"partial"} if alone else of_sum
    constants = shape.constants() | {
        "X_ALIGN": VECTOR_BYTES // shape.x_bytes,
        "OUT_ALIGN": shape.out_align,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "SPLITS": tiling.splits,
        "SWAP": tiling.swap,
        "SCALE_ROWS": None if shape.block is None else shape.block[0],
        "SCALE_COLUMNS": None if shape.block is None else shape.block[1],
        "LINES": power_of_2(max(1, tiling.block_k * tiling.num_stages * shape.w_bytes // LINE.value)),
        "PDL": pdl,
    }
    tiles = KernelSpec(
        name,
        tile_gemm,
        **arguments_of(tile_gemm, {key: types[key] for key in types.keys() - absent}, constants),
        grid=(str(-(-shape.n // tiling.block_n)), str(tiling.splits), "1"),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        options={"launch_pdl": True} if pdl else {},
    )
    if alone:
        return SmallKernel(most_rows, (tiles,))
    taken = {key: types[key] for key in types.keys() & {*of_sum, "partial", "rows"}}
    sums, workspaces = sum_kernel(shape, taken, name=name, block_m=tiling.block_m, splits=tiling.splits, pdl=pdl)
    return SmallKernel(most_rows, (tiles, sums), workspaces)


def sum_kernel(
    shape: GemmShape, types: Mapping[str, str], *, name: str, block_m: int, splits: int, pdl: bool
) -> tuple[KernelSpec, dict[str, tuple[str, int]]]:
    """Return the kernel that adds the sums of `splits` programs, `name`_sum, and the workspaces in which they lie."""
    of_sum = {key: kind for key, kind in types.items() if key in sum_partial.arg_names}
    constants: dict[str, Constant] = {
        "N": shape.n,
        "OUT_ALIGN": shape.out_align,
        "BLOCK_M": block_m,
        "BLOCK_N": SUM_COLUMNS,
        "SPLITS": splits,
        "PDL": pdl,
    }
    sums = KernelSpec(
        f"{name}_sum",
        sum_partial,
        **arguments_of(sum_partial, of_sum, constants),
        grid=(str(-(-shape.n // SUM_COLUMNS)), str(block_m), "1"),
        num_warps=4,
        num_stages=1,
        options={"launch_pdl": True} if pdl else {},
    )
    return sums, {"partial": ("float32", splits * block_m * shape.n * FLOATS["float32"])}
