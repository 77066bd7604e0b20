"""One row times a block-quantized weight matrix: the twin of `row_gemm`, one 16-byte unit of weights a load."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.plugins.kernels.block_layout import UNIT_BYTES, BlockShape
from llmbuild.plugins.kernels.block_tile import high_half, load_scales, low_half
from llmbuild.plugins.kernels.gemm_shape import GemmShape, SmallKernel, power_of_2
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of

MOST_UNITS = 512  # of a row that a program has on their way at once


@triton.jit
def block_row_gemm(
    x,
    w,
    w_scale,
    w_offset,
    bias,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, BLOCK_N),). x [K], w uint8 [N, units of a row, 16], w_scale and w_offset [N, blocks], out [N]."""
    VALUES: tl.constexpr = 128 // BITS
    ROW_UNITS: tl.constexpr = (K + VALUES - 1) // VALUES
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    row = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first)[:, None]  # rows past the last are this one once more
    byte = tl.arange(0, 16)
    acc = tl.zeros([BLOCK_N, UNITS], tl.float32)
    w += first.to(tl.int64) * (ROW_UNITS * 16)
    BLOCKS: tl.constexpr = (K + BLOCK_SIZE - 1) // BLOCK_SIZE
    w_scale += first.to(tl.int64) * BLOCKS
    if w_offset is not None:
        w_offset += first.to(tl.int64) * BLOCKS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.static_range(0, ROW_UNITS, UNITS):
        unit = start + tl.arange(0, UNITS)
        inside = (unit < ROW_UNITS)[None, :]
        addresses = w + row[:, :, None] * (ROW_UNITS * 16) + unit[None, :, None] * 16 + byte[None, None, :]
        units = tl.load(addresses, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
        k = unit * VALUES
        scale = load_scales(w_scale, row, k[None, :], inside, K, BLOCK_SIZE)
        if PDL and start == 0:  # weights are asked for before waiting, x is not
            tl.extra.cuda.gdc_wait()
        columns = k[:, None] + byte[None, :]
        x_low = tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)
        sum_x = tl.sum(x_low, 1)[None, :]
        products = tl.sum(low_half(units, BITS) * x_low[None, :, :], 2)
        if BITS == 4:
            x_high = tl.load(x + 16 + columns, mask=16 + columns < K, other=0.0).to(tl.float32)
            sum_high = tl.sum(x_high, 1)[None, :]
            products_high = tl.sum(high_half(units) * x_high[None, :, :], 2)
            if BLOCK_SIZE % VALUES == 0 or BLOCKS == 1:
                sum_x += sum_high
                products += products_high
            else:  # the halves of a unit belong to different blocks
                inside_high = inside & (k + 16 < K)[None, :]
                scale_high = load_scales(w_scale, row, k[None, :] + 16, inside_high, K, BLOCK_SIZE)
                acc += scale_high * ((1 << BITS) * products_high - ((1 << BITS) + ZERO) * sum_high)
                if w_offset is not None:
                    acc += load_scales(w_offset, row, k[None, :] + 16, inside_high, K, BLOCK_SIZE) * sum_high
        acc += scale * ((1 << BITS) * products - ((1 << BITS) + ZERO) * sum_x)
        if w_offset is not None:
            acc += load_scales(w_offset, row, k[None, :], inside, K, BLOCK_SIZE) * sum_x
    total = tl.sum(acc, 1)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


@dataclass(frozen=True)
class BlockRowTiling:
    """Rows of the weight, and units of each, that a program takes at once."""

    block_n: int
    units: int
    num_warps: int


def block_row_tiling(shape: GemmShape, block: BlockShape) -> BlockRowTiling:
    """Return the tiling of a shape: about 8 KiB of weights a program, two units a thread."""
    units = min(power_of_2(block.units(shape.k)), MOST_UNITS)
    block_n = min(max(1, 8192 // (units * UNIT_BYTES)), power_of_2(shape.n))
    return BlockRowTiling(block_n, units, max(1, min(8, block_n * units // 64)))


def block_row_kernel(
    shape: GemmShape,
    block: BlockShape,
    *,
    name: str,
    tiling: BlockRowTiling | None = None,
    pdl: bool = False,
) -> SmallKernel:
    """Return the kernel for one row. pdl: programmatic dependent launch (SM 90 and up)."""
    tiling = tiling or block_row_tiling(shape, block)
    constants = shape.constants() | block.constants(shape.k)
    constants |= {"BLOCK_N": tiling.block_n, "UNITS": tiling.units, "PDL": pdl}
    spec = KernelSpec(
        name,
        block_row_gemm,
        **arguments_of(block_row_gemm, shape.types(90) | block.types(), constants),
        grid=(str(-(-shape.n // tiling.block_n)), "1", "1"),
        num_warps=tiling.num_warps,
        num_stages=1,
        options={"launch_pdl": True} if pdl else {},
    )
    return SmallKernel(1, (spec,))
