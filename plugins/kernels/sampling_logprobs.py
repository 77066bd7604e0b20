"""Log-probabilities from the raw logits: of the sampled token with its rank, and of the likeliest tokens.

Chunks of the vocabulary side by side, then one program a row that merges what they found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.sampling_order import HIGHEST_ID, LOWEST_KEY, from_key, to_key

MOST_LOGPROBS = 20  # of the likeliest tokens, for a row


@triton.jit
def logprob_chunks(
    logits,
    token_ids,
    logprob_counts,
    part_keys,
    part_ids,
    part_sums,
    part_ranks,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (CHUNKS, L). Of a chunk: its likeliest tokens, as many as the row asks for (at least one), falling.

    token_ids int32 [L]: those sampled. logprob_counts int32 [L]: how many likeliest tokens are asked for, at most MOST;
    -1: no logprobs, and nothing is written. part_keys, part_ids int32 [L, CHUNKS, MOST]; part_sums float32
    [L, CHUNKS]: sum of exp(logit - highest of the chunk); part_ranks int32 [L, CHUNKS]: how many are likelier than
    the sampled token.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    part = row * CHUNKS + chunk
    wanted = tl.load(logprob_counts + row)
    if wanted >= 0:
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = columns < TOKENS
        x = tl.load(logits + row * COLUMNS + columns, mask=inside, other=float("-inf")).to(tl.float32)
        keys = tl.where(inside, to_key(x), LOWEST_KEY)
        sampled = tl.load(logits + row * COLUMNS + tl.load(token_ids + row)).to(tl.float32)
        tl.store(part_ranks + part, tl.sum((keys > to_key(sampled)).to(tl.int32), 0))
        peak = from_key(tl.max(keys, 0))
        # exp(-inf - -inf) is no number: a chunk of -inf adds nothing
        weights = tl.where(peak == float("-inf"), 0.0, tl.exp(x - peak))
        tl.store(part_sums + part, tl.sum(tl.where(inside, weights, 0.0), 0))
        for place in range(tl.maximum(wanted, 1)):
            highest = tl.max(keys, 0)
            first = tl.min(tl.where(keys == highest, columns, HIGHEST_ID), 0)
            tl.store(part_keys + part * MOST + place, highest)
            tl.store(part_ids + part * MOST + place, first)
            keys = tl.where(columns == first, LOWEST_KEY, keys)


@triton.jit
def logprob_rows(
    logits,
    token_ids,
    logprob_counts,
    part_keys,
    part_ids,
    part_sums,
    part_ranks,
    logprob_ids,
    logprobs,
    ranks,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    MOST_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (L,). logprob_ids int32, logprobs float32 [L, 1 + MOST]: the sampled token, then the likeliest ones.

    ranks int32 [L]: how many tokens are likelier than the sampled one, plus 1. Of a row only what it asks for is
    written.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(logprob_counts + row)
    if wanted >= 0:
        chunks = tl.arange(0, CHUNKS_BLOCK)
        parts = row * CHUNKS + chunks
        inside = chunks < CHUNKS
        tl.store(ranks + row, 1 + tl.sum(tl.load(part_ranks + parts, mask=inside, other=0), 0))
        peaks = from_key(tl.load(part_keys + parts * MOST, mask=inside, other=LOWEST_KEY))
        peaks = tl.where(inside, peaks, float("-inf"))
        sums = tl.load(part_sums + parts, mask=inside, other=0.0)
        peak = tl.max(peaks, 0)
        norm = tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
        token = tl.load(token_ids + row)
        sampled = tl.load(logits + row * COLUMNS + token).to(tl.float32)
        out = row * (1 + MOST)
        tl.store(logprob_ids + out, token)
        tl.store(logprobs + out, (sampled - peak) - norm)

        # Chunk major: of equal keys the one further ahead has the lower id, both within a chunk and across chunks.
        places = tl.arange(0, CHUNKS_BLOCK * MOST_BLOCK)
        chunk = places // MOST_BLOCK
        place = places % MOST_BLOCK
        there = (chunk < CHUNKS) & (place < wanted)
        at = (row * CHUNKS + chunk) * MOST + place
        keys = tl.load(part_keys + at, mask=there, other=LOWEST_KEY)
        ids = tl.load(part_ids + at, mask=there, other=HIGHEST_ID)
        for number in range(wanted):
            highest = tl.max(keys, 0)
            first = tl.min(tl.where(keys == highest, ids, HIGHEST_ID), 0)
            tl.store(logprob_ids + out + 1 + number, first)
            tl.store(logprobs + out + 1 + number, (from_key(highest) - peak) - norm)
            keys = tl.where(ids == first, LOWEST_KEY, keys)
