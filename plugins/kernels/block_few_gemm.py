"""A few rows times a weight matrix of 4-bit blocks, each of which is a product of its own on tensor cores.

The values of a block of 128 columns become 16-bit floats q - zero, exactly (`block_widen`), and are the left operand;
their scale is applied to the sums of a block, not to its weights. Blocks are the batch of the product: each warp has
some, all warps of a program the same rows, and so a program takes all of K without a second kernel that adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.plugins.kernels.block_layout import UNIT_BYTES, BlockShape
from llmbuild.plugins.kernels.block_widen import widen_halves
from llmbuild.plugins.kernels.gemm_shape import VECTOR_BYTES, GemmShape, SmallKernel, power_of_2
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of
from llmbuild.plugins.kernels.weight_tile import LINE, prefetch_rows

GROUP = 128  # columns of a product: four units

MOST_LINES = 64  # of the cache, of each row, that are asked for before the first is needed


@triton.jit(do_not_specialize=["rows", "x_stride", "out_stride"])
def block_few_gemm(
    x,
    w,
    w_scale,
    w_offset,
    bias,
    out,
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
    GROUPS: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, BLOCK_N),). rows <= BLOCK_M. x [rows, K] with x_stride, a multiple of X_ALIGN, out [rows, N] with
    out_stride, a multiple of OUT_ALIGN.

    w uint8 [N, units of a row * 16] of 4 BITS, w_scale and w_offset [N, blocks]; BLOCK_SIZE is a multiple of 128 or at
    least K. GROUPS: of 128 columns in a step.
    """
    tl.static_assert(BITS == 4)
    GROUP: tl.constexpr = 128
    ROW_BYTES: tl.constexpr = (K + 31) // 32 * 16
    BLOCKS: tl.constexpr = (K + BLOCK_SIZE - 1) // BLOCK_SIZE
    STEPS: tl.constexpr = (K + GROUP * GROUPS - 1) // (GROUP * GROUPS)
    first = tl.program_id(0) * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        row = tl.minimum(row, N - 1 - first)  # rows past the last are this one once more
    m = tl.arange(0, BLOCK_M)
    live = (m < rows)[None, None, :]
    group = tl.arange(0, GROUPS)
    byte = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    k = (byte // 16 * 32 + byte % 16)[:, :, None]  # of the values in low halves
    w += first.to(tl.int64) * ROW_BYTES
    w_rows = w + row[None, :, None] * ROW_BYTES + byte[:, None, :]
    w_scale += first.to(tl.int64) * BLOCKS
    if w_offset is not None:
        w_offset += first.to(tl.int64) * BLOCKS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch_rows(w, row, 0, ROW_BYTES, ROW_BYTES, 1, LINES)  # what no other kernel writes, before waiting
        tl.extra.cuda.gdc_wait()

    x_rows = x + m.to(tl.int64)[None, None, :] * (x_stride // X_ALIGN * X_ALIGN)
    totals = tl.zeros([GROUPS, BLOCK_N, BLOCK_M], tl.float32)
    for step in range(STEPS):
        done = step * (GROUPS * GROUP // 2)
        if K % (GROUPS * GROUP) == 0:
            units = tl.load(w_rows + done, eviction_policy="evict_first")
        else:
            inside = (done + byte < ROW_BYTES)[:, None, :]
            units = tl.load(w_rows + done, mask=inside, other=0, eviction_policy="evict_first")
        columns = step * (GROUPS * GROUP) + k
        x_low = tl.load(x_rows + columns, mask=live & (columns < K), other=0.0)
        x_high = tl.load(x_rows + columns + 16, mask=live & (columns + 16 < K), other=0.0)
        of_block = (step * GROUPS + group)[:, None] * GROUP
        places = row[None, :] * BLOCKS + of_block // BLOCK_SIZE
        scale = tl.load(w_scale + places, mask=of_block < K, other=0.0).to(tl.float32)
        low, high = widen_halves(units, ZERO, x_low.dtype)
        sums = tl.dot(high, x_high, tl.dot(low, x_low))
        totals += sums * scale[:, :, None]
        if w_offset is not None:
            offset = tl.load(w_offset + places, mask=of_block < K, other=0.0).to(tl.float32)
            ones = tl.full(low.shape, 1.0, low.dtype)
            totals += tl.dot(ones, x_high, tl.dot(ones, x_low)) * offset[:, :, None]
    total = tl.sum(totals, 0)

    n = first + tl.arange(0, BLOCK_N)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N).to(tl.float32)[:, None]
    result = tl.trans(total)
    mask = (m < rows)[:, None] & (n < N)[None, :]
    places = out + m.to(tl.int64)[:, None] * (out_stride // OUT_ALIGN * OUT_ALIGN) + n[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class BlockFewTiling:
    """Rows of the weight of a program, groups of 128 columns of a step, each of which a warp has."""

    block_n: int
    groups: int
    num_warps: int


def reads_few(shape: GemmShape, block: BlockShape) -> bool:
    """Whether the kernel computes a product: a group of columns must have one scale, x 16 bits."""
    one_scale = block.block_size % GROUP == 0 or block.block_size >= shape.k
    return block.bits == 4 and shape.x_bytes == 2 and one_scale


def block_few_tiling(shape: GemmShape, most_rows: int) -> BlockFewTiling:
    """Return the tiling of a shape: narrow layers in tiles so narrow that each processor has several; else such that x,
    which each program reads, weighs less than the weights."""
    narrow = shape.n <= 8192
    block_n = (16 if narrow else 32) * (1 if most_rows <= 8 else 2)
    groups = min(8 if block_n == 16 else 4, power_of_2(-(-shape.k // GROUP)))
    return BlockFewTiling(block_n, groups, min(4, groups))


def block_few_kernel(
    shape: GemmShape,
    block: BlockShape,
    sm: int,
    *,
    name: str,
    most_rows: int,
    tiling: BlockFewTiling | None = None,
    pdl: bool = False,
) -> SmallKernel:
    """Return the kernel for at most `most_rows`, 8 or a power of 2 above. pdl: programmatic dependent launch (SM 90 and
    up)."""
    tiling = tiling or block_few_tiling(shape, most_rows)
    types = shape.types(sm) | block.types()
    constants = shape.constants() | block.constants(shape.k)
    constants |= {
        "X_ALIGN": VECTOR_BYTES // shape.x_bytes,
        "OUT_ALIGN": shape.out_align,
        "BLOCK_M": most_rows,
        "BLOCK_N": tiling.block_n,
        "GROUPS": tiling.groups,
        "LINES": min(MOST_LINES, power_of_2(-(-block.units(shape.k) * UNIT_BYTES // LINE.value))),
        "PDL": pdl,
    }
    spec = KernelSpec(
        name,
        block_few_gemm,
        **arguments_of(block_few_gemm, {key: types[key] for key in types.keys() - {"partial"}}, constants),
        grid=(str(-(-shape.n // tiling.block_n)), "1", "1"),
        num_warps=tiling.num_warps,
        num_stages=1,
        options={"launch_pdl": True} if pdl else {},
    )
    return SmallKernel(most_rows, (spec,))
