"""Paged attention of chunks: several sequences, each with any number of new tokens after any number of cached ones.

A program takes one KV head and BLOCK_Q consecutive new tokens of one sequence, with all query heads of the group as
rows of one tile. Keys come in three ranges, so that only those that need it pay for masks:

    window 100, tokens at positions 256 .. 287, BLOCK_N 64
    positions   128 ........ 191 | 192 .......... 255 | 256 ........ 287
                masked: left of    every row sees       masked: a key may
                some row's window  all of these         be a row's future

Which sequence a block belongs to is counted from `cu_q_lens` in the program: sequence i owns the blocks from
cu_q_lens[i] // BLOCK_Q + i on (at least enough of them; a block without tokens ends at once). So the grid is an
expression in T and B, the host prepares nothing per step, and the programs wait for memory once, where a binary
search would wait log2(B) times.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES, AttentionShape, power_of_2, steps_in_flight
from llmbuild.plugins.kernels.attention_tile import attend_range, load_rows, store_result
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of


@triton.jit
def sequence_of_block(cu_q_lens, sequences, block, BLOCK_Q: tl.constexpr):
    """The last sequence whose first block is not after `block`: how many there are, less one."""
    count = 0
    for start in range(0, sequences, 128):
        index = start + tl.arange(0, 128)
        first_token = tl.load(cu_q_lens + index, mask=index < sequences, other=0)
        before = (first_token // BLOCK_Q + index <= block) & (index < sequences)
        count += tl.sum(before.to(tl.int32), 0)
    return count - 1


@triton.jit(do_not_specialize=["table_stride", "sequences"])
def paged_attention_prefill(
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
    table_stride,
    sequences,
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
    TILE_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (KV_HEADS * tiles of a group, T // BLOCK_Q + sequences).

    q [T, HEADS, HEAD_DIM], out [T, HEADS, VALUE_DIM]; pools keys [slots, KV_HEADS, HEAD_DIM] and values;
    block_tables int32 [sequences, table_stride], seq_lens [sequences], cu_q_lens [sequences + 1] int32.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the end of a prompt is the most work: it starts first
    sequence = sequence_of_block(cu_q_lens, sequences, block, BLOCK_Q)
    first_token = tl.load(cu_q_lens + sequence)
    queries = tl.load(cu_q_lens + sequence + 1) - first_token
    first = (block - first_token // BLOCK_Q - sequence) * BLOCK_Q  # of the sequence's new tokens
    if PDL:  # what is loaded above is older than the kernel before this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if first >= queries:
        return
    length = tl.load(seq_lens + sequence)
    past = length - queries

    # rows: (token 0, head 0), (token 0, head 1), ..., (token 1, head 0), ...
    rows = tl.arange(0, ROWS)
    token = first + rows // TILE_HEADS
    member = tile * TILE_HEADS + rows % TILE_HEADS
    head = kv_head * GROUP + member
    live = (token < queries) & (rows < BLOCK_Q * TILE_HEADS) & (member < GROUP)
    q_rows = ((first_token + token) * HEADS + head).to(tl.int64)
    q_tile = load_rows(q, q_rows, live, HEAD_DIM, 0, HEAD_DIM, HEAD_BLOCK, True)
    q_rest = q_tile
    if REST_BLOCK > 0:
        q_rest = load_rows(q, q_rows, live, HEAD_DIM, HEAD_BLOCK, HEAD_DIM, REST_BLOCK, True)
    row_slopes = None
    if slopes is not None:
        row_slopes = tl.load(slopes + head, mask=live, other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    key_head = keys + kv_head * HEAD_DIM
    value_head = values + kv_head * VALUE_DIM
    key_scales = k_scales + kv_head if KV_SCALES == "token" else k_scales
    value_scales = v_scales + kv_head if KV_SCALES == "token" else v_scales

    first_position = past + first
    last_position = past + tl.minimum(first + BLOCK_Q, queries) - 1
    end = last_position + 1
    lowest = 0
    full_begin = 0
    if WINDOW is not None:
        lowest = tl.maximum(first_position - WINDOW + 1, 0)
        full_begin = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
    full_end = (first_position + 1) // BLOCK_N * BLOCK_N

    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(0, 3):
        if part == 0:
            begin, stop = lowest // BLOCK_N * BLOCK_N, tl.minimum(full_begin, end)
        elif part == 1:
            begin, stop = full_begin, full_end
        else:
            begin, stop = tl.maximum(full_begin, full_end), end
        if part > 0 or WINDOW is not None:
            acc, total, peak = attend_range(
                acc,
                total,
                peak,
                q_tile,
                q_rest,
                past + token,
                row_slopes,
                table,
                key_head,
                value_head,
                key_scales,
                value_scales,
                begin,
                stop,
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
                part != 1,
            )

    if KV_SCALES == "layer":
        acc *= tl.load(v_scales)
    store_result(out, q_rows, head, live, acc, total, peak, sinks, VALUE_DIM, VALUE_BLOCK)


@dataclass(frozen=True)
class PrefillTiling:
    """Rows (tokens times query heads of a group) of a program's tile, and keys a step of its loop."""

    rows: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_tiling(shape: AttentionShape, sm: int) -> PrefillTiling:
    """Return the tiling for a layer on an SM: the larger the tile, the less often keys are read."""
    budget = SHARED_BYTES[sm] * 1024 - 16 * 1024
    wide = shape.value_dim > 128 or shape.head_dim > 256
    float32 = shape.dtype == "float32"
    rows = 128 if sm >= 90 and not wide and not float32 else 64
    while rows > 16 and rows * shape.query_bytes > SHARED_BYTES[sm] * 1024 // 2:
        rows //= 2
    budget -= rows * shape.query_bytes
    block_n, stages = (32 if float32 else 64), 5

    def needed() -> int:  # one step more than in flight: matrix units read from shared memory while the next arrive
        return (steps_in_flight(stages) + 1) * shape.cached_bytes(block_n)

    if needed() > budget:
        stages = 3
    while needed() > budget and block_n > 16:
        block_n //= 2
    return PrefillTiling(rows, block_n, 8 if rows * power_of_2(shape.value_dim) >= 128 * 128 else 4, stages)


def prefill_spec(
    shape: AttentionShape,
    sm: int,
    *,
    name: str = "attention_prefill",
    tiling: PrefillTiling | None = None,
    pdl: bool = False,
) -> KernelSpec:
    """Return the kernel of a layer's attention over chunks; `sequences` is B. sm, pdl: as in `decode_plan`."""
    tiling = tiling or prefill_tiling(shape, sm)
    tile_heads = min(shape.group, tiling.rows)
    block_q = tiling.rows // tile_heads
    constants = shape.constants() | {
        "TILE_HEADS": tile_heads,
        "BLOCK_Q": block_q,
        "ROWS": tiling.rows,
        "BLOCK_N": tiling.block_n,
        "PDL": pdl,
    }
    return KernelSpec(
        name,
        paged_attention_prefill,
        **arguments_of(paged_attention_prefill, shape.types() | {"sequences": "i32"}, constants),
        grid=(str(shape.kv_heads * -(-shape.group // tile_heads)), f"T // {block_q} + B", "1"),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        options={"launch_pdl": True} if pdl else {},
    )
