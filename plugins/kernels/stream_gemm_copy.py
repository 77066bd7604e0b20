"""The two groups of warps that bring weights and rows of `stream_gemm` into shared memory.

They are apart so that weights need not wait: nothing writes them, so their copies begin while the kernel before this
one still runs, as far as the ring has room; rows are what that kernel writes.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def share_of(UNITS: gl.constexpr):
    """The units of this program: begin .. end - 1. Unit u is step u % STEPS of tile u // STEPS."""
    program = gl.program_id(0)
    return program * UNITS // gl.num_programs(0), (program + 1) * UNITS // gl.num_programs(0)


@gluon.jit
def copy_weights(
    w, ring, full, empty, N: gl.constexpr, K: gl.constexpr, UNITS: gl.constexpr, STEPS: gl.constexpr
):  # fmt: skip
    """Copy [BLOCK_N, BLOCK_K] of w for each unit into the next slot of the ring; rows past the last are that one."""
    SLOTS: gl.constexpr = ring.shape[0]
    BLOCK_N: gl.constexpr = ring.shape[1]
    BLOCK_K: gl.constexpr = ring.shape[2]
    VECTOR: gl.constexpr = 128 // ring.dtype.primitive_bitwidth  # 16 bytes
    LANES: gl.constexpr = BLOCK_K // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    begin, end = share_of(UNITS)
    for unit in range(begin, end):
        slot = (unit - begin) % SLOTS
        first = unit // STEPS * BLOCK_N
        n = row
        if N % BLOCK_N != 0:
            n = gl.minimum(row, N - 1 - first)
        sources = w + first.to(gl.int64) * K + unit % STEPS * BLOCK_K + n[:, None] * K + k[None, :]
        mbarrier.wait(empty.index(slot), ((unit - begin) // SLOTS & 1) ^ 1)
        async_copy.async_copy_global_to_shared(ring.index(slot), sources)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)  # when this thread's copies are there
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def copy_rows(
    x,
    rows,
    x_stride,
    ring,
    full,
    empty,
    X_ALIGN: gl.constexpr,
    UNITS: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Copy [BLOCK_M, BLOCK_K] of x for each unit into the next slot of the ring; rows past the last are zeros."""
    SLOTS: gl.constexpr = ring.shape[0]
    BLOCK_M: gl.constexpr = ring.shape[1]
    BLOCK_K: gl.constexpr = ring.shape[2]
    VECTOR: gl.constexpr = 128 // ring.dtype.primitive_bitwidth
    LANES: gl.constexpr = BLOCK_K // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    sources = x + m[:, None] * (x_stride // X_ALIGN * X_ALIGN) + k[None, :]
    begin, end = share_of(UNITS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for unit in range(begin, end):
        slot = (unit - begin) % SLOTS
        mbarrier.wait(empty.index(slot), ((unit - begin) // SLOTS & 1) ^ 1)
        async_copy.async_copy_global_to_shared(
            ring.index(slot), sources + unit % STEPS * BLOCK_K, mask=(m < rows)[:, None]
        )
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(0)
