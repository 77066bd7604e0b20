"""The group of warps of `stream_gemm` that multiplies, and puts together the sums of tiles that programs share.

A program whose units begin or end within a tile leaves its sums in `partial`; the last to do so of those that share the
tile adds them, in the order of their columns: the same bits each time. It knows that it is the last from a counter of
the tile, which it sets back to zero for the next launch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from llmbuild.plugins.kernels.stream_gemm_copy import share_of

WARPS = gl.constexpr(4)


@gluon.jit
def program_of(unit, UNITS: gl.constexpr):
    """The program that has a unit: the last p with p * UNITS // programs <= unit."""
    return ((unit + 1) * gl.num_programs(0) - 1) // UNITS


@gluon.jit
def place_of(program, tile, UNITS: gl.constexpr, STEPS: gl.constexpr):
    """Where a program leaves its sums of a tile: it shares two at most, that of its first unit and a later one."""
    begin = program * UNITS // gl.num_programs(0)
    return 2 * program + (begin < tile * STEPS).to(gl.int32)


@gluon.jit
def store_sums(
    out,
    acc,
    x_scale,
    w_scale,
    bias,
    n,
    m,
    rows,
    out_stride,
    N: gl.constexpr,
    OUT_ALIGN: gl.constexpr,
):
    """Scale acc [n, m], add the bias and store it: column n of row m of out."""
    if w_scale is not None:
        acc *= gl.load(w_scale + n, mask=n < N, other=0.0)[:, None]
    if x_scale is not None:
        acc *= gl.load(x_scale + m, mask=m < rows, other=0.0)[None, :]
    if bias is not None:
        acc += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    places = out + (m * (out_stride // OUT_ALIGN * OUT_ALIGN))[None, :] + n[:, None]
    gl.store(places, acc.to(out.dtype.element_ty), mask=(m < rows)[None, :] & (n < N)[:, None])


@gluon.jit
def multiply(
    out,
    x_scale,
    w_scale,
    bias,
    partial,
    counters,
    rows,
    out_stride,
    w_ring,
    x_ring,
    full,
    empty,
    N: gl.constexpr,
    OUT_ALIGN: gl.constexpr,
    UNITS: gl.constexpr,
    STEPS: gl.constexpr,
    SEGMENTS: gl.constexpr,
):
    SLOTS: gl.constexpr = w_ring.shape[0]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BITS: gl.constexpr = w_ring.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 256 // BITS])
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    begin, end = share_of(UNITS)
    unit = begin
    while unit < end:
        tile = unit // STEPS
        stop = gl.minimum(end, (tile + 1) * STEPS)
        acc = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, layout)
        for step in range(unit, stop):
            count = step - begin
            slot = count % SLOTS
            mbarrier.wait(full.index(slot), count // SLOTS & 1)
            fence_async_shared()  # the matrix units read through another door than the one that threads write through
            weights, columns = w_ring.index(slot), x_ring.index(slot).permute((1, 0))
            if BITS == 8:
                # The units keep 14 bits of a sum of float8 products: they give up theirs after each step.
                none = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, layout)
                part = warpgroup_mma(weights, columns, none, use_acc=False, is_async=True)
                acc += warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(slot), count=1)
            else:  # the product before this one has ended when one is left
                acc = warpgroup_mma(weights, columns, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index((count + SLOTS - 1) % SLOTS), count=1, pred=step > unit)
        if BITS != 8:
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((stop - 1 - begin) % SLOTS), count=1)
        n = tile * BLOCK_N + column
        last = stop - unit == STEPS
        if SEGMENTS > 1:  # known when compiled  # noqa: SIM102
            if not last:
                sums = partial + column[:, None] * BLOCK_M + m[None, :]
                live = (m < rows)[None, :]
                mine = place_of(gl.program_id(0), tile, UNITS, STEPS)
                gl.store(sums + mine.to(gl.int64) * (BLOCK_N * BLOCK_M), acc, mask=live)
                gl.thread_barrier()
                first = program_of(tile * STEPS, UNITS)
                segments = program_of(tile * STEPS + STEPS - 1, UNITS) - first + 1
                last = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == segments - 1
                if last:
                    gl.atomic_xchg(counters + tile, 0, sem="relaxed", scope="gpu")
                    acc = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, layout)
                    for segment in gl.static_range(SEGMENTS):
                        place = place_of(first + segment, tile, UNITS, STEPS).to(gl.int64)
                        found = sums + place * (BLOCK_N * BLOCK_M)
                        acc += gl.load(found, mask=live & (segment < segments), other=0.0, cache_modifier=".cg")
        if last:
            store_sums(out, acc, x_scale, w_scale, bias, n, m, rows, out_stride, N, OUT_ALIGN)
        unit = stop
