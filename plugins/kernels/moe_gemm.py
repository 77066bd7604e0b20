"""Products of blocks of rows with the weight of the expert that each block belongs to (see `moe_sort`).

One kernel serves both linears of an expert: the first takes the rows of tokens and ends with the activation, the
second takes the rows that the first left, one for each pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.plugins.kernels.activations import activate

GROUP = tl.constexpr(16)  # blocks whose programs run side by side, so that they find their weights in the L2 cache


@triton.jit
def expert_gemm(
    a,
    order,
    block_experts,
    w,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = activation of (a[pair // PAIRS_OF_ROW] @ w[expert]ᵀ + bias[expert]). Grid: (blocks * tiles of N,).

    w [E, HALVES * N, K], bias [E, HALVES * N] or None, out [pairs, N]. HALVES 2: gate rows come first, and the result
    is activation(min(gate, LIMIT)) · (clip(up, -LIMIT, LIMIT) + SHIFT). ACTIVATION None: none, with HALVES 1.
    """
    block, first = place_of_program(N, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
        live = (pair >= 0)[:, None]
        k = tl.arange(0, BLOCK_K)
        row = tl.arange(0, BLOCK_N)
        if N % BLOCK_N != 0:
            row = tl.minimum(row, N - 1 - first)  # rows past the last are this one once more
        a_rows = a + (tl.maximum(pair, 0) // PAIRS_OF_ROW).to(tl.int64)[:, None] * K + k[None, :]
        w_rows = w + (expert * (HALVES * N) + first) * K + row[:, None] * K + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = acc
        for start in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                a_tile = tl.load(a_rows + start, mask=live, other=0.0)
                w_tile = tl.load(w_rows + start)
            else:
                inside = (start + k < K)[None, :]
                a_tile = tl.load(a_rows + start, mask=live & inside, other=0.0)
                w_tile = tl.load(w_rows + start, mask=inside, other=0.0)
            acc = tl.dot(a_tile, tl.trans(w_tile), acc, input_precision="ieee")
            if HALVES == 2:
                if K % BLOCK_K == 0:
                    up_tile = tl.load(w_rows + (N * K + start))
                else:
                    up_tile = tl.load(w_rows + (N * K + start), mask=inside, other=0.0)
                up = tl.dot(a_tile, tl.trans(up_tile), up, input_precision="ieee")

        finish(acc, up, bias, out, expert, pair, first, row, N, HALVES, ACTIVATION, SLOPE, LIMIT, SHIFT, BLOCK_N)


@triton.jit
def place_of_program(N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block and first column of a program of a grid of blocks * tiles of N: GROUP blocks, then the next tile."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    blocks = tl.num_programs(0) // TILES
    group = tl.program_id(0) // (GROUP * TILES)
    width = tl.minimum(blocks - group * GROUP, GROUP)
    within = tl.program_id(0) - group * (GROUP * TILES)
    return group * GROUP + within % width, within // width * BLOCK_N


@triton.jit
def finish(
    acc,
    up,
    bias,
    out,
    expert,
    pair,
    first,
    row,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bias and activation of the sums of a tile, gate (or all) in acc and up, and the rows of its pairs in out."""
    if bias is not None:
        biases = bias + expert * (HALVES * N) + first + row
        acc += tl.load(biases).to(tl.float32)[None, :]
        if HALVES == 2:
            up += tl.load(biases + N).to(tl.float32)[None, :]
    if HALVES == 2:
        if LIMIT is not None:
            acc = tl.minimum(acc, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        acc = activate(acc, ACTIVATION, SLOPE) * (up + SHIFT)
    elif ACTIVATION is not None:
        acc = activate(acc, ACTIVATION, SLOPE)
    n = first + tl.arange(0, BLOCK_N)
    places = out + tl.maximum(pair, 0).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(pair >= 0)[:, None] & (n < N)[None, :])


@dataclass(frozen=True)
class ExpertTiling:
    """A program's tile and columns of a step. block_n: of each half, gate and up."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
