"""One row times a weight matrix: every program asks for all of its weights at once, and sums them on the way.

At one row a GEMM is as fast as its weights are read. Tensor cores would not help; what does is to have many reads on
their way, so a program takes few rows of the weight and all of K (one row of 4,096 numbers by 8 warps: 32 bytes a
thread).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.plugins.kernels.gemm_shape import GemmShape, SmallKernel, power_of_2
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of
from llmbuild.plugins.kernels.weight_tile import widen

MOST_COLUMNS = 16384  # that a program has on their way at once


@triton.jit
def row_gemm(
    x,
    w,
    x_scale,
    w_scale,
    bias,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, BLOCK_N),). x [K], w [N, K], x_scale [1], w_scale [N], bias [N], out [N]; scales and bias may be
    None."""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        row = tl.minimum(row, N - 1 - first)  # rows past the last are this one once more
    k = tl.arange(0, BLOCK_K)
    w += first.to(tl.int64) * K
    if PDL:  # the next kernel may come as soon as there is room for it
        tl.extra.cuda.gdc_launch_dependents()
    # The kernel before this one writes x, and no weights: these are asked for before waiting.
    weights = load_weights(w, row, k, K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = widen(weights) * widen(load_row(x, k, K, BLOCK_K))[None, :]
    for begin in range(BLOCK_K, K, BLOCK_K):
        weights = load_weights(w, row, begin + k, K, BLOCK_K)
        acc += widen(weights) * widen(load_row(x, begin + k, K, BLOCK_K))[None, :]
    total = tl.sum(acc, 1)
    inside = n < N
    if w_scale is not None:
        total *= tl.load(w_scale + n, mask=inside)
    if x_scale is not None:
        total *= tl.load(x_scale)
    if bias is not None:
        total += tl.load(bias + n, mask=inside).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_weights(w, row, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    addresses = w + row[:, None] * K + k[None, :]
    if K % BLOCK_K == 0:
        tile = tl.load(addresses, eviction_policy="evict_first")
    else:
        tile = tl.load(addresses, mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def load_row(x, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    if K % BLOCK_K == 0:
        row = tl.load(x + k)
    else:
        row = tl.load(x + k, mask=k < K, other=0.0)
    return row


@dataclass(frozen=True)
class RowTiling:
    """Rows of the weight and columns that a program takes at once."""

    block_n: int
    block_k: int
    num_warps: int


def row_tiling(shape: GemmShape) -> RowTiling:
    """Return the tiling for a shape: about 8 KiB of weights a program, or all of a longer row."""
    block_k = min(power_of_2(max(shape.k, 16)), MOST_COLUMNS)
    block_n = max(1, 8192 // (block_k * shape.w_bytes))
    block_n = min(block_n, power_of_2(shape.n))
    # 32 bytes a thread, as was best in bfloat16 on an H200
    return RowTiling(block_n, block_k, max(1, min(8, block_n * block_k * shape.w_bytes // 1024)))


def row_kernel(
    shape: GemmShape, sm: int, *, name: str, tiling: RowTiling | None = None, pdl: bool = False
) -> SmallKernel:
    """Return the kernel for one row. pdl: programmatic dependent launch (SM 90 and up)."""
    tiling = tiling or row_tiling(shape)
    constants = shape.constants() | {"BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "PDL": pdl}
    spec = KernelSpec(
        name,
        row_gemm,
        **arguments_of(row_gemm, shape.types(sm), constants),
        grid=(str(-(-shape.n // tiling.block_n)), "1", "1"),
        num_warps=tiling.num_warps,
        num_stages=1,
        options={"launch_pdl": True} if pdl else {},
    )
    return SmallKernel(1, (spec,))
