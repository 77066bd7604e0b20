"""A group of warps of `attention_hopper` that multiplies: 64 rows of queries against the tiles that the ring brings.

The products with the keys of a tile and with the values of the one before it are given to the matrix units together;
while they work on the second, the softmax of the first is computed. As in `attention_tile`, scores are kept in base 2
and a row's softmax is carried as its peak, the sum of its weights, and the values weighted with the same.
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

from llmbuild.plugins.kernels.attention_hopper_work import count_of_blocks, ticket_of, work_of

LOG2E = gl.constexpr(1.4426950408889634)
# Does nothing; but neither may the compiler know that, nor move it behind the wait that follows it: else the softmax
# would be computed after the product that it is to overlap with.
PIN = gl.constexpr(
    "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.eq.f32 p, $1, 0fBF800000; @p st.shared.f32 [a], $1; "
    "mov.f32 $0, $1; }"  # a sum of weights is never -1
)


@gluon.jit
def arrived(ring, full, copies):
    """The slot that copy number `copies` fills, when it has."""
    slot = copies % ring.shape[0]
    mbarrier.wait(full.index(slot), (copies // ring.shape[0]) & 1)
    fence_async_shared()  # the matrix units read through another door than the one that threads write through
    return slot


@gluon.jit
def scores_of(queue, ring, slot, layout: gl.constexpr):
    """Start the product with the keys in a slot."""
    none = gl.full([queue.shape[0], ring.shape[1]], 0.0, gl.float32, layout)
    return warpgroup_mma(queue, ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def hide(scores, tile, limits, layout: gl.constexpr):
    """Take away the keys at positions after a row's limit."""
    positions = tile * scores.shape[1] + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
    return gl.where(positions[None, :] <= limits[:, None], scores, float("-inf"))


@gluon.jit
def weigh(scores, peak, total, factor: gl.constexpr, MASKED: gl.constexpr):
    """Weights of a tile, what to shrink all before them by, the new peak and the new sum."""
    new = gl.maximum(peak, gl.max(scores, 1) * factor)
    base = new
    if MASKED:
        base = gl.where(new == float("-inf"), 0.0, new)  # no key seen yet: exp2(-inf - 0) = 0, not nan
    weights = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(peak - base)
    return weights, shrink, new, total * shrink + gl.sum(weights, 1)


@gluon.jit
def pack(weights, kind: gl.constexpr):
    """float32 [M, N] as int32 [M, N / 2], two numbers of 16 bits each: a loop keeps them in half of the registers."""
    even, odd = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    instruction: gl.constexpr = "cvt.rn.bf16x2.f32" if kind == gl.bfloat16 else "cvt.rn.f16x2.f32"
    convert: gl.constexpr = instruction + " $0, $2, $1;"
    return gl.inline_asm_elementwise(convert, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(both, kind: gl.constexpr, layout: gl.constexpr):
    even = both.to(gl.int16).to(kind, bitcast=True)
    odd = (both >> 16).to(gl.int16).to(kind, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [both.shape[0], both.shape[1] * 2]), layout)


@gluon.jit
def consumer(
    WHICH: gl.constexpr,
    out,
    seq_lens,
    cu_q_lens,
    sequences,
    q_tile,
    ring,
    full,
    empty,
    q_free,
    SCALE: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):
    GROUP: gl.constexpr = HEADS // KV_HEADS
    BLOCK_N: gl.constexpr = ring.shape[1]
    HEAD_DIM: gl.constexpr = ring.shape[2]
    LANES: gl.constexpr = HEAD_DIM // 8
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])  # whole lines
    factor: gl.constexpr = SCALE * LOG2E
    kind: gl.constexpr = ring.dtype
    queue = q_tile.index(WHICH)
    blocks = count_of_blocks(cu_q_lens, sequences, BLOCK_Q)
    copies = 0
    for turn in range(gl.cdiv(blocks * KV_HEADS, gl.num_programs(0))):
        work = work_of(cu_q_lens, seq_lens, sequences, blocks, ticket_of(turn), KV_HEADS, BLOCK_Q, BLOCK_N)
        kv_head, _, origin, first, queries, length, end, tiles = work
        if tiles > 0:
            newest = tiles - 1
            rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, score_layout))
            limits = gl.minimum(length - queries + first + rows // GROUP, end - 1)
            masked = tiles - gl.minimum((length - queries + first + 1) // BLOCK_N, tiles)  # the others are seen whole

            slot = arrived(ring, full, copies)
            scores = warpgroup_mma_wait(0, deps=[scores_of(queue, ring, slot, score_layout)])
            mbarrier.arrive(empty.index(slot), count=1)
            if tiles == 1:
                mbarrier.arrive(q_free, count=1)
            copies += 1
            scores = hide(scores, newest, limits, score_layout)
            peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
            total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, score_layout))
            weights, shrink, peak, total = weigh(scores, peak, total, factor, True)
            packed = pack(weights, kind)
            acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, acc_layout)
            for part in gl.static_range(2):
                begin = 1 if part == 0 else gl.maximum(masked, 1)
                stop = gl.maximum(masked, 1) if part == 0 else tiles
                for step in range(begin, stop):
                    slot = arrived(ring, full, copies)
                    scores = scores_of(queue, ring, slot, score_layout)
                    value_slot = arrived(ring, full, copies + 1)
                    values = ring.index(value_slot)
                    acc = warpgroup_mma(unpack(packed, kind, weight_layout), values, acc, is_async=True)
                    scores = warpgroup_mma_wait(1, deps=[scores])
                    mbarrier.arrive(empty.index(slot), count=1)
                    if step == newest:
                        mbarrier.arrive(q_free, count=1)
                    if part == 0:
                        scores = hide(scores, newest - step, limits, score_layout)
                    weights, shrink, peak, total = weigh(scores, peak, total, factor, part == 0)
                    total = gl.inline_asm_elementwise(PIN, "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1)
                    acc, weights, total = warpgroup_mma_wait(0, deps=[acc, weights, total])
                    packed = pack(weights, kind)
                    mbarrier.arrive(empty.index(value_slot), count=1)
                    acc = acc * gl.convert_layout(shrink, row_layout)[:, None]
                    copies += 2
            slot = arrived(ring, full, copies)
            acc = warpgroup_mma(unpack(packed, kind, weight_layout), ring.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(slot), count=1)
            copies += 1

            acc = acc / gl.convert_layout(total, row_layout)[:, None]
            result = gl.convert_layout(acc.to(kind), out_layout)
            rows = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, out_layout))
            token = first + rows // GROUP
            out_rows = (origin + token).to(gl.int64) * HEADS + kv_head * GROUP + rows % GROUP
            channels = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
            places = out + out_rows[:, None] * HEAD_DIM + channels[None, :]
            gl.store(places, result, mask=(token < queries)[:, None])
