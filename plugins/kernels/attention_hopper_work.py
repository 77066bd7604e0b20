"""Which pieces of work a program of `attention_hopper` does: BLOCK_Q new tokens of a sequence for a KV head each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def count_of_blocks(cu_q_lens, sequences, BLOCK_Q: gl.constexpr):
    """Sequence i owns the blocks from cu_q_lens[i] // BLOCK_Q + i on, as in `paged_attention_prefill`."""
    return gl.load(cu_q_lens + sequences) // BLOCK_Q + sequences


@gluon.jit
def sequence_of(cu_q_lens, sequences, block, BLOCK_Q: gl.constexpr):
    """The last sequence whose first block is not after `block`."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    count = 0
    for start in range(0, sequences, 128):
        index = start + gl.arange(0, 128, layout)
        first_token = gl.load(cu_q_lens + index, mask=index < sequences, other=0)
        before = (first_token // BLOCK_Q + index <= block) & (index < sequences)
        count += gl.sum(before.to(gl.int32), 0)
    return count - 1


@gluon.jit
def ticket_of(turn):
    """The piece of work of a program's turn: turns go to and fro over the programs, so that the sizes even out."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def work_of(
    cu_q_lens,
    seq_lens,
    sequences,
    blocks,
    ticket,
    KV_HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """KV head, sequence, its first token in the step, the work's first token in the sequence's new ones, how many new
    tokens and how many tokens in all it has, end of the keys that are seen, and tiles of them: 0 where there is
    nothing to do. The work on the end of a prompt is the most and has the lowest tickets.
    """
    kv_head = ticket % KV_HEADS
    block = blocks - 1 - ticket // KV_HEADS  # below 0 for tickets after the last
    sequence = gl.maximum(sequence_of(cu_q_lens, sequences, block, BLOCK_Q), 0)
    origin = gl.load(cu_q_lens + sequence)
    queries = gl.load(cu_q_lens + sequence + 1) - origin
    length = gl.load(seq_lens + sequence)
    first = (block - origin // BLOCK_Q - sequence) * BLOCK_Q
    end = length - queries + gl.minimum(first + BLOCK_Q, queries)
    some = (block >= 0) & (first < queries)
    tiles = gl.where(some, (end + BLOCK_N - 1) // BLOCK_N, 0)
    return kv_head, sequence, origin, first, queries, length, end, tiles
