"""Paged attention of a few new tokens per sequence: the keys of a sequence are shared among several programs.

A program takes one KV head of one sequence, all its query heads and new tokens as the rows of one tile (so that the
cache is read once), and one of `splits` equal ranges of the keys. With one split it finishes the rows itself. With
more, it leaves each row normalised, beside the log2 of its sum, and `merge_splits` weighs them together.

    sequence of 200 keys, window none, BLOCK_N 64, 3 splits, 2 new tokens:
    positions  0 ........ 127 | 128 ........ 199 | (empty)        queries at 198 and 199
               split 0          split 1            split 2
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.attention_shape import (
    PROCESSORS,
    SHARED_BYTES,
    AttentionShape,
    power_of_2,
    steps_in_flight,
)
from llmbuild.plugins.kernels.attention_tile import LOG2E, attend_range, load_rows, store_result
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of

MOST_SPLITS = 64
MOST_ROWS = 64  # of a tile


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
    PDL: tl.constexpr,
):
    """Grid: (KV_HEADS * tiles of a group, splits, sequences).

    q [T, HEADS, HEAD_DIM], out [T, HEADS, VALUE_DIM]; pools keys [slots, KV_HEADS, HEAD_DIM] and values;
    block_tables int32 [sequences, table_stride], seq_lens [sequences], cu_q_lens [sequences + 1] int32;
    partial float32 [sequences, MOST_QUERIES, HEADS, splits, VALUE_DIM], sums float32 the same without the last axis:
    written for splits > 1. A sequence has at most MOST_QUERIES new tokens; one without any writes nothing.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    split = tl.program_id(1)
    splits = tl.num_programs(1)
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
    if PDL:  # what is loaded above is older than the kernel before this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_rows = ((first_token + token) * HEADS + head).to(tl.int64)
    q_tile = load_rows(q, q_rows, live, HEAD_DIM, 0, HEAD_DIM, HEAD_BLOCK, True)
    q_rest = q_tile
    if REST_BLOCK > 0:
        q_rest = load_rows(q, q_rows, live, HEAD_DIM, HEAD_BLOCK, HEAD_DIM, REST_BLOCK, True)
    row_slopes = None
    if slopes is not None:
        row_slopes = tl.load(slopes + head, mask=live, other=0.0)

    lowest = 0
    if WINDOW is not None:
        lowest = tl.maximum(length - queries - WINDOW + 1, 0)  # what the first of the new tokens sees
    aligned = lowest // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(length - aligned, splits), BLOCK_N) * BLOCK_N
    begin = aligned + split * share
    end = tl.minimum(begin + share, length)

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
        # A row without a key in this range has the sum 0, log2 of it -inf, and no partial result that is read.
        places = ((sequence * MOST_QUERIES + token) * HEADS + head).to(tl.int64) * splits + split
        some = live & (total > 0)
        channels = tl.arange(0, VALUE_BLOCK)
        tl.store(sums + places, tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=live)
        mask = some[:, None] & (channels[None, :] < VALUE_DIM)
        tl.store(partial + places[:, None] * VALUE_DIM + channels[None, :], acc / total[:, None], mask=mask)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    partial,
    sums,
    sinks,
    cu_q_lens,
    out,
    splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MOST_QUERIES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (sequences, MOST_QUERIES * HEADS, cdiv(VALUE_DIM, BLOCK_D)). `splits` <= BLOCK_S as in the attention."""
    sequence = tl.program_id(0)
    token = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    first_token = tl.load(cu_q_lens + sequence)
    last_token = tl.load(cu_q_lens + sequence + 1) - 1
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if first_token + token > last_token:
        return
    split = tl.arange(0, BLOCK_S)
    places = ((sequence * MOST_QUERIES + token) * HEADS + head).to(tl.int64) * splits + split
    sum_log2 = tl.load(sums + places, mask=split < splits, other=float("-inf"))
    peak = tl.max(sum_log2, 0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(sum_log2 - peak)
    total = tl.sum(weights, 0)
    if sinks is not None:
        total += tl.exp2(sink - peak)  # here, once, and not in the splits
    channels = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (sum_log2 > float("-inf"))[:, None] & (channels[None, :] < VALUE_DIM)
    rows = tl.load(partial + places[:, None] * VALUE_DIM + channels[None, :], mask=mask, other=0.0)
    result = tl.sum(rows * weights[:, None], 0) / total
    row = ((first_token + token) * HEADS + head).to(tl.int64)
    tl.store(out + row * VALUE_DIM + channels, result.to(out.dtype.element_ty), mask=channels < VALUE_DIM)


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
    """Both kernels of a layer, in order, and the expressions in B (sequences) that their launch needs.

    splits: programs that share the keys of a sequence, and the argument `splits` of `merge`. `merge` has an empty grid
    where it is 1: there is nothing to launch then.
    partial_bytes, sums_bytes: size of the two float32 buffers between the kernels.
    """

    attend: KernelSpec
    merge: KernelSpec
    splits: str
    partial_bytes: str
    sums_bytes: str

    def sizes(self, sequences: int) -> tuple[int, int, int]:
        """Return (splits, partial_bytes, sums_bytes) for a batch."""
        splits, partial, sums = (
            evaluate(text, {"B": sequences}) for text in (self.splits, self.partial_bytes, self.sums_bytes)
        )
        return splits, partial, sums


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

    sm: compute capability as 90. name: of the attention kernel; the other one is called `name`_merge. processors:
    multiprocessors of the card; those of the usual card of that capability if None. pdl: programmatic dependent launch:
    each kernel may start before the one before it ends, and waits where it needs its results (SM 90 and up).
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
    types = shape.types() | {"partial": "*fp32", "sums": "*fp32"}
    constants = shape.constants() | {
        "MOST_QUERIES": most_queries,
        "TILE_HEADS": tile_heads,
        "ROWS": rows,
        "BLOCK_N": tiling.block_n,
        "PDL": pdl,
    }
    options = {"launch_pdl": True} if pdl else {}
    attend = KernelSpec(
        name,
        paged_attention_decode,
        **arguments_of(paged_attention_decode, types, constants),
        grid=(str(columns), splits, "B"),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        options=options,
    )
    merge_types = {key: types[key] for key in ("partial", "sums", "sinks", "cu_q_lens", "out") if key in types}
    block_d = min(128, power_of_2(shape.value_dim))
    merge_constants = {
        "HEADS": shape.heads,
        "VALUE_DIM": shape.value_dim,
        "MOST_QUERIES": most_queries,
        "BLOCK_S": MOST_SPLITS,
        "BLOCK_D": block_d,
        "PDL": pdl,
    }

    results = shape.heads * most_queries
    merge = KernelSpec(
        f"{name}_merge",
        merge_splits,
        **arguments_of(merge_splits, merge_types | {"splits": "i32"}, merge_constants),
        grid=(f"B * min(1, {splits} - 1)", str(results), str(-(-shape.value_dim // block_d))),
        num_warps=4,
        options=options,
    )
    places = f"B * {results * 4} * {splits}"
    return DecodePlan(attend, merge, splits, f"{places} * {shape.value_dim}", places)
