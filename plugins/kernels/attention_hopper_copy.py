"""The group of warps that brings queries, keys and values of `attention_hopper` into shared memory.

Keys and values of a tile are rows that lie anywhere in the pools, so they are copied by the threads (`cp.async`), each
row from the slot that the block table names, and announce themselves at a barrier when they have arrived. What is
copied when, for a piece of work with tiles 0 .. 2 (the newest keys come first: they alone need masks):

    Q | K2 | K1 V2 | K0 V1 | V0         then the next piece: its Q as soon as the last keys have met the old one
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from llmbuild.plugins.kernels.attention_hopper_work import count_of_blocks, ticket_of, work_of

CHUNK = gl.constexpr(64)  # rows whose table entries a thread group holds at a time


@gluon.jit
def copy_rows(target, base, rows, present, ROW: gl.constexpr, layout: gl.constexpr, MASKED: gl.constexpr):
    """Start to copy rows that lie ROW elements apart; those that are not `present` become zeros."""
    channels = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    sources = base + rows.to(gl.int64)[:, None] * ROW + channels[None, :]
    if MASKED:
        async_copy.async_copy_global_to_shared(target, sources, mask=present[:, None])
    else:
        async_copy.async_copy_global_to_shared(target, sources)


@gluon.jit
def copy_tile(
    ring,
    full,
    empty,
    copies,
    base,
    table,
    tile,
    end,
    PAGE: gl.constexpr,
    ROW: gl.constexpr,
    layout: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Copy the rows of tile number `tile`, positions below `end`, into the next slot of the ring."""
    SLOTS: gl.constexpr = ring.shape[0]
    BLOCK_N: gl.constexpr = ring.shape[1]
    slot = copies % SLOTS
    mbarrier.wait(empty.index(slot), ((copies // SLOTS) & 1) ^ 1)
    for part in gl.static_range(BLOCK_N // CHUNK):
        positions = tile * BLOCK_N + part * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        present = positions < end
        if MASKED:
            blocks = gl.load(table + positions // PAGE, mask=present, other=0)
        else:
            blocks = gl.load(table + positions // PAGE)
        rows = blocks * PAGE + positions % PAGE
        copy_rows(ring.index(slot).slice(part * CHUNK, CHUNK), base, rows, present, ROW, layout, MASKED)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)  # when all copies of the thread have arrived
    return copies + 1


@gluon.jit
def producer(
    q,
    keys,
    values,
    block_tables,
    seq_lens,
    cu_q_lens,
    table_stride,
    sequences,
    q_tile,
    ring,
    full,
    empty,
    q_free,
    PAGE: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):
    GROUP: gl.constexpr = HEADS // KV_HEADS
    HEAD_DIM: gl.constexpr = ring.shape[2]
    ROW: gl.constexpr = KV_HEADS * HEAD_DIM
    LANES: gl.constexpr = HEAD_DIM // 8  # 16 bytes each
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    blocks = count_of_blocks(cu_q_lens, sequences, BLOCK_Q)
    copies = 0
    pieces = 0
    for turn in range(gl.cdiv(blocks * KV_HEADS, gl.num_programs(0))):
        work = work_of(cu_q_lens, seq_lens, sequences, blocks, ticket_of(turn), KV_HEADS, BLOCK_Q, ring.shape[1])
        kv_head, sequence, origin, first, queries, _, end, tiles = work
        if tiles > 0:
            table = block_tables + sequence.to(gl.int64) * table_stride
            key_base = keys + kv_head * HEAD_DIM
            value_base = values + kv_head * HEAD_DIM
            mbarrier.wait(q_free, (pieces & 1) ^ 1)
            pieces += 1
            for half in gl.static_range(2):
                rows = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
                token = first + rows // GROUP
                q_rows = (origin + token) * HEADS + kv_head * GROUP + rows % GROUP
                copy_rows(q_tile.index(half), q, q_rows, token < queries, HEAD_DIM, layout, True)
            newest = tiles - 1
            copies = copy_tile(ring, full, empty, copies, key_base, table, newest, end, PAGE, ROW, layout, True)
            for step in range(1, tiles):
                tile = newest - step
                copies = copy_tile(ring, full, empty, copies, key_base, table, tile, end, PAGE, ROW, layout, False)
                copies = copy_tile(ring, full, empty, copies, value_base, table, tile + 1, end, PAGE, ROW, layout, True)
            copies = copy_tile(ring, full, empty, copies, value_base, table, 0, end, PAGE, ROW, layout, True)
    async_copy.commit_group()
    async_copy.wait_group(0)
