"""`moe_gemm` with block-quantized experts: the rows of all of them below each other, as `block_layout` packs them."""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.block_step import add_step, columns_of, load_x
from llmbuild.plugins.kernels.moe_gemm import finish, place_of_program


@triton.jit
def expert_block_gemm(
    a,
    order,
    block_experts,
    w,
    w_scale,
    w_offset,
    bias,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    HALVES: tl.constexpr,
    PAIRS_OF_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `moe_gemm.expert_gemm`, with w uint8 [E * HALVES * N, units of a row * 16], w_scale and w_offset [E * HALVES *
    N, blocks]. UNITS: of each row in a step."""
    VALUES: tl.constexpr = 128 // BITS
    ROW_UNITS: tl.constexpr = (K + VALUES - 1) // VALUES
    BLOCKS: tl.constexpr = (K + BLOCK_SIZE - 1) // BLOCK_SIZE
    block, first = place_of_program(N, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
        live = (pair >= 0)[:, None]
        row = tl.arange(0, BLOCK_N)
        if N % BLOCK_N != 0:
            row = tl.minimum(row, N - 1 - first)  # rows past the last are this one once more
        a_rows = a + (tl.maximum(pair, 0) // PAIRS_OF_ROW).to(tl.int64)[:, None] * K
        above = expert * (HALVES * N) + first
        w += above * (ROW_UNITS * 16)
        w_scale += above * BLOCKS
        if w_offset is not None:
            w_offset += above * BLOCKS
        column = columns_of(BITS, UNITS)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = acc
        for start in range(0, ROW_UNITS, UNITS):
            k = start * VALUES + column
            x_low = load_x(a_rows, k, live, K, UNITS * VALUES)
            x_high = x_low
            if BITS == 4:
                x_high = load_x(a_rows, k + 16, live, K, UNITS * VALUES)
            acc = add_step(
                acc, x_low, x_high, w, w_scale, w_offset, row, start, K, BITS, BLOCK_SIZE, ZERO, UNITS, BLOCK_N, False
            )
            if HALVES == 2:
                up = add_step(
                    up, x_low, x_high, w, w_scale, w_offset, N + row, start, K, BITS, BLOCK_SIZE, ZERO, UNITS, BLOCK_N,
                    False,
                )  # fmt: skip
        finish(acc, up, bias, out, expert, pair, first, row, N, HALVES, ACTIVATION, SLOPE, LIMIT, SHIFT, BLOCK_N)
