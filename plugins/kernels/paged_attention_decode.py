"""Paged attention of a few new tokens per sequence: the keys of a sequence are shared among several programs.

A program takes one KV head of one sequence, all its query heads and new tokens as the rows of one tile (so that the
cache is read once), and one of `splits` equal ranges of the keys. Where one split has them all it finishes the rows
itself. Else the last program of a tile puts its results together: `attention_merge`.

    sequence of 200 keys, window none, BLOCK_N 64, 3 splits, 2 new tokens:
    positions  0 ........ 127 | 128 ........ 199 |                queries at 198 and 199
               split 0          split 1            split 2 has none and ends at once
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.attention_merge import is_last, leave_split, merge_splits
from llmbuild.plugins.kernels.attention_shape import (
    PROCESSORS,
    SHARED_BYTES,
    AttentionShape,
    power_of_2,
    steps_in_flight,
)
from llmbuild.plugins.kernels.attention_tile import attend_range, load_rows, store_result
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of

MOST_SPLITS = 64
MOST_ROWS = 64  # of a tile
MERGE_COST = 1.0  # of a byte of a split's result, in bytes of the cache


@triton.jit(do_not_specialize=["table_stride"])
def paged_attention_decode(
    q,
    keys,
    values,
    k_scales,
    v_scales,
    sinks,
    slopes,
    block_tables,
    seq_lens,
    cu_q_lens,
    out,
    partial,
    sums,
    counters,
    table_stride,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    MOST_QUERIES: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE_KEYS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (KV_HEADS * tiles of a group, splits, sequences).

    q [T, HEADS, HEAD_DIM], out [T, HEADS, VALUE_DIM]; pools keys [slots, KV_HEADS, HEAD_DIM] and values;
    block_tables int32 [sequences, table_stride], seq_lens [sequences], cu_q_lens [sequences + 1] int32;
    partial float32 [sequences, KV_HEADS * tiles, splits, MOST_QUERIES * TILE_HEADS, VALUE_DIM], sums float32 the same
    without the last axis: written where splits share the keys; counters int32 [sequences, KV_HEADS * tiles], zero
    before and after each launch. A sequence has at most MOST_QUERIES new tokens; one without any writes nothing.
    MERGE_KEYS: keys that a split reads while the results of another are put in; MERGE_ROWS, AT_ONCE: `merge_splits`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(cu_q_lens + sequence)
    queries = tl.load(cu_q_lens + sequence + 1) - first_token
    length = tl.load(seq_lens + sequence)

    # rows: (token 0, head 0), (token 0, head 1), ..., (token 1, head 0), ...
    rows = tl.arange(0, ROWS)
    token = rows // TILE_HEADS
    member = tile * TILE_HEADS + rows % TILE_HEADS
    head = kv_head * GROUP + member
    live = (token < queries) & (token < MOST_QUERIES) & (member < GROUP)

    lowest = 0
    if WINDOW is not None:
        lowest = tl.maximum(length - queries - WINDOW + 1, 0)  # what the first of the new tokens sees
    aligned = lowest // BLOCK_N * BLOCK_N
    seen = length - aligned
    # Time to read a share and then all results is least where both take as long: share = seen / share * MERGE_KEYS.
    least = tl.sqrt(seen.to(tl.float32) * MERGE_KEYS).to(tl.int32)
    share = tl.cdiv(tl.maximum(tl.maximum(tl.cdiv(seen, tl.num_programs(1)), least), 1), BLOCK_N) * BLOCK_N
    splits = tl.maximum(tl.cdiv(seen, share), 1)  # those that have keys
    begin = aligned + split * share
    end = tl.minimum(begin + share, length)
    if PDL:  # what is loaded above is older than the kernel before this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if split >= splits:
        return
    q_rows = ((first_token + token) * HEADS + head).to(tl.int64)
    q_tile = load_rows(q, q_rows, live, HEAD_DIM, 0, HEAD_DIM, HEAD_BLOCK, True)
    q_rest = q_tile
    if REST_BLOCK > 0:
        q_rest = load_rows(q, q_rows, live, HEAD_DIM, HEAD_BLOCK, HEAD_DIM, REST_BLOCK, True)
    row_slopes = None
    if slopes is not None:
        row_slopes = tl.load(slopes + head, mask=live, other=0.0)

    acc, total, peak = attend_range(
        tl.zeros([ROWS, VALUE_BLOCK], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        q_tile,
        q_rest,
        length - queries + token,
        row_slopes,
        block_tables + sequence.to(tl.int64) * table_stride,
        keys + kv_head * HEAD_DIM,
        values + kv_head * VALUE_DIM,
        k_scales + kv_head if KV_SCALES == "token" else k_scales,
        v_scales + kv_head if KV_SCALES == "token" else v_scales,
        begin,
        end,
        lowest,
        SCALE,
        SOFTCAP,
        WINDOW,
        KV_SCALES,
        PAGE,
        KV_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        HEAD_BLOCK,
        REST_BLOCK,
        VALUE_BLOCK,
        BLOCK_N,
        True,  # one loop: a second one for the last keys would wait for memory once more
    )
    if KV_SCALES == "layer":
        acc *= tl.load(v_scales)

    if splits == 1:
        store_result(out, q_rows, head, live, acc, total, peak, sinks, VALUE_DIM, VALUE_BLOCK)
    else:
        LIVE: tl.constexpr = MOST_QUERIES * TILE_HEADS
        column = sequence * tl.num_programs(0) + tl.program_id(0)
        first_place = column.to(tl.int64) * tl.num_programs(1) * LIVE
        leave_split(partial, sums, first_place + split * LIVE + rows, live, acc, total, peak, VALUE_DIM, VALUE_BLOCK)
        if is_last(counters + column, splits):
            merge_splits(
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
                HEADS,
                GROUP,
                VALUE_DIM,
                VALUE_BLOCK,
                MOST_QUERIES,
                TILE_HEADS,
                MERGE_ROWS,
                AT_ONCE,
            )


@dataclass(frozen=True)
class DecodeTiling:
    """How the work is cut: keys a step of the loop, and how many programs each processor should get at least.

    Keys are split until it does: more of them than run at once level out the last wave, and cost partial results.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_processor: int


@dataclass(frozen=True)
class DecodePlan:
    """The kernel of a layer, and the expressions in B (sequences) that its launch needs.

    splits: programs that may share the keys of a sequence. partial_bytes, sums_bytes: size of the two float32 buffers
    between them. counter_bytes: of int32 numbers that must be zero, and are left zero.
    """

    attend: KernelSpec
    splits: str
    partial_bytes: str
    sums_bytes: str
    counter_bytes: str

    def sizes(self, sequences: int) -> tuple[int, int, int, int]:
        """Return (splits, partial_bytes, sums_bytes, counter_bytes) for a batch."""
        texts = (self.splits, self.partial_bytes, self.sums_bytes, self.counter_bytes)
        splits, partial, sums, counters = (evaluate(text, {"B": sequences}) for text in texts)
        return splits, partial, sums, counters


def most_rows(shape: AttentionShape, sm: int) -> int:
    """Rows of a tile at most, so that queries take no more than a third of the shared memory beside the keys.

    Query heads that do not fit are spread over several programs.
    """
    rows = MOST_ROWS
    while rows > 16 and rows * shape.query_bytes > SHARED_BYTES[sm] * 1024 // 3:
        rows //= 2
    return rows


def decode_tiling(shape: AttentionShape, sm: int, rows: int = 16) -> DecodeTiling:
    """Return the tiling of a layer on an SM, for so many rows: as many keys in flight as leave room for two programs.

    Where not even 16 keys do, one program may have all the shared memory.
    """
    whole = SHARED_BYTES[sm] * 1024 - rows * shape.query_bytes - 8 * 1024
    # Measured on an H200 with heads of 128 channels (docs/performance.md): many small programs with deep pipelines.
    # Of a cache in 8 bits, converting the keys is what takes the time: larger steps of two warps, 1.6 times as fast.
    narrow = max(shape.head_dim, shape.value_dim) <= 128
    block_n, stages = (64, 5) if shape.kv_bytes == 1 and narrow else (32, 7)
    while steps_in_flight(stages) * shape.cached_bytes(block_n) > whole // 2 and block_n > 16:
        block_n //= 2
    if steps_in_flight(stages) * shape.cached_bytes(block_n) > whole:
        stages = 3
    warps = (2 if shape.kv_bytes == 1 else 1) if narrow else 4 if shape.value_dim <= 256 else 8
    return DecodeTiling(block_n, warps, stages, programs_per_processor=3)


def merge_tiling(live: int, value_block: int, num_warps: int) -> tuple[int, int]:
    """Return MERGE_ROWS and AT_ONCE: 128 registers of each thread for results in flight, and up to 32 for their sum."""
    rows = 1 << (live - 1).bit_length()
    while rows > 1 and rows * value_block > 32 * 32 * num_warps:
        rows //= 2
    each = max(16, rows * value_block // (32 * num_warps))
    return rows, max(1, 128 // each)


def decode_plan(
    shape: AttentionShape,
    sm: int,
    *,
    name: str = "attention_decode",
    most_queries: int = 1,
    tiling: DecodeTiling | None = None,
    processors: int | None = None,
    pdl: bool = False,
) -> DecodePlan:
    """Plan a layer's attention for steps of at most `most_queries` (1 .. 8) new tokens per sequence.

    sm: compute capability as 90. name: of the kernel. processors: multiprocessors of the card; those of the usual card
    of that capability if None. pdl: programmatic dependent launch: each kernel may start before the one before it ends,
    and waits where it needs its results (SM 90 and up).
    """
    if not 1 <= most_queries <= 8:
        raise ValueError(f"most_queries is {most_queries}; 1 to 8 new tokens are decoded at once")
    tile_heads = min(shape.group, most_rows(shape, sm) // most_queries)
    rows = power_of_2(tile_heads * most_queries)
    tiling = tiling or decode_tiling(shape, sm, rows)
    tiles = -(-shape.group // tile_heads)
    columns = shape.kv_heads * tiles
    wanted = (processors or PROCESSORS[sm]) * tiling.programs_per_processor
    splits = f"min({MOST_SPLITS}, cdiv({wanted}, B * {columns}))"
    types = shape.types() | {"partial": "*fp32", "sums": "*fp32", "counters": "*i32"}
    live = tile_heads * most_queries
    merge_rows, at_once = merge_tiling(live, shape.value_block, tiling.num_warps)
    constants = shape.constants() | {
        "MOST_QUERIES": most_queries,
        "TILE_HEADS": tile_heads,
        "ROWS": rows,
        "BLOCK_N": tiling.block_n,
        "MERGE_KEYS": MERGE_COST * live * shape.value_dim * 4 / (shape.kv_bytes * (shape.head_dim + shape.value_dim)),
        "MERGE_ROWS": merge_rows,
        "AT_ONCE": at_once,
        "PDL": pdl,
    }
    attend = KernelSpec(
        name,
        paged_attention_decode,
        **arguments_of(paged_attention_decode, types, constants),
        grid=(str(columns), splits, "B"),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        options={"launch_pdl": True} if pdl else {},
    )
    places = f"B * {columns * live * 4} * {splits}"
    return DecodePlan(attend, splits, f"{places} * {shape.value_dim}", places, f"B * {columns * 4}")
