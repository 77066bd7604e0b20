"""Results of the splits of a sequence's keys, put together by the program that is the last of them.

Each split leaves its rows normalised in `partial`, beside the log2 of their sums in `sums`, and counts itself in. All
that a program has written is there for the one that finds all others counted: it weighs the rows together, in the order
of the splits whoever comes last, and sets the counter back to zero for the next launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.attention_tile import LOG2E


@triton.jit
def leave_split(
    partial,
    sums,
    places,
    live,
    acc,
    total,
    peak,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Store the live rows of a tile [M, VALUE_BLOCK] at `places` [M]; of a row that saw no key, zeros and log2(0)."""
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    channels = tl.arange(0, VALUE_BLOCK)
    mask = live[:, None] & (channels[None, :] < VALUE_DIM)
    tl.store(sums + places, tl.where(some, peak + tl.log2(divisor), float("-inf")), mask=live)
    tl.store(partial + places[:, None] * VALUE_DIM + channels[None, :], acc / divisor[:, None], mask=mask)


@triton.jit
def is_last(counter, splits):
    """Count this program in, with all that it has written; return whether it is the last of `splits`."""
    tl.debug_barrier()  # the thread that counts speaks for all
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merge_splits(
    out,
    partial,
    sums,
    sinks,
    first_place,
    splits,
    first_token,
    queries,
    kv_head,
    tile,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    MOST_QUERIES: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Weigh the results of `splits` programs together and store them, MERGE_ROWS rows after the other.

    Row r (token r // TILE_HEADS, head r % TILE_HEADS of the tile) of split s lies at first_place + s * ROWS + r. Loads
    of AT_ONCE splits are in flight together.
    """
    ROWS: tl.constexpr = MOST_QUERIES * TILE_HEADS
    channels = tl.arange(0, VALUE_BLOCK)
    inside = channels[None, :] < VALUE_DIM
    for begin in range(0, ROWS, MERGE_ROWS):
        rows = begin + tl.arange(0, MERGE_ROWS)
        token = rows // TILE_HEADS
        member = tile * TILE_HEADS + rows % TILE_HEADS
        head = kv_head * GROUP + member
        live = (token < queries) & (token < MOST_QUERIES) & (member < GROUP)
        if sinks is not None:
            peak = tl.load(sinks + head, mask=live, other=0.0) * LOG2E
            total = tl.full([MERGE_ROWS], 1.0, tl.float32)  # the sinks': here, once, and not in the splits
        else:
            peak = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
            total = tl.zeros([MERGE_ROWS], tl.float32)
        acc = tl.zeros([MERGE_ROWS, VALUE_BLOCK], tl.float32)
        for start in range(0, splits, AT_ONCE):
            for step in tl.static_range(AT_ONCE):
                there = live & (start + step < splits)
                places = first_place + (start + step) * ROWS + rows
                values = partial + places[:, None] * VALUE_DIM + channels[None, :]
                # from the L2, which all processors share, not from what this one's own cache may hold
                sum_log2 = tl.load(sums + places, mask=there, other=float("-inf"), cache_modifier=".cg")
                block = tl.load(values, mask=there[:, None] & inside, other=0.0, cache_modifier=".cg")
                new_peak = tl.maximum(peak, sum_log2)
                base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key seen yet: exp2(-inf - 0) = 0
                weight = tl.exp2(sum_log2 - base)
                shrink = tl.exp2(peak - base)
                total = total * shrink + weight
                acc = acc * shrink[:, None] + block * weight[:, None]
                peak = new_peak
        result = acc / total[:, None]
        row = ((first_token + token) * HEADS + head).to(tl.int64)
        mask = live[:, None] & inside
        tl.store(out + row[:, None] * VALUE_DIM + channels[None, :], result.to(out.dtype.element_ty), mask=mask)
