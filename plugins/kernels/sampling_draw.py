"""The draw: the weights of what the cuts keep, summed by chunk, then inverted in rising order of the ids.

    sums of chunks:    |---- 0 ----|------ 1 ------|-- 2 --|  ...  total
    floor(u * total):                      ^ in chunk 1, at the first id whose running sum is above it

All sums are exact integers, so that the draw always falls on a token of the chunk, and one that has a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.sampling_greedy import finish_row
from llmbuild.plugins.kernels.sampling_order import (
    exponent,
    from_key,
    is_finite,
    not_after,
    row_peak,
    to_key,
    to_weight,
)
from llmbuild.plugins.kernels.sampling_philox import below


@triton.jit
def kept_weights(
    logits,
    row,
    columns,
    highest,
    heat,
    least,
    cut_key,
    cut_id,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Weights, int64, of the columns of a row; 0 for those that are cut."""
    inside = columns < TOKENS
    x = tl.load(logits + row * COLUMNS + columns, mask=inside, other=float("-inf")).to(tl.float32)
    kept = inside & not_after(to_key(x), columns, cut_key, cut_id)
    return tl.where(kept, to_weight(exponent(x, highest, heat), least), 0)


@triton.jit
def sample_sums(
    logits,
    peak_keys,
    peak_ids,
    temperature,
    min_p,
    cut_keys,
    cut_ids,
    chunk_sums,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (CHUNKS, L). chunk_sums int64 [L, CHUNKS]: weight of what is kept of a chunk; not written if greedy."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row)
    cut_key = tl.load(cut_keys + row)
    total = tl.full([], 0, tl.int64)
    if heat > 0:
        if tl.load(peak_keys + row * CHUNKS + chunk) >= cut_key:
            highest, _ = row_peak(peak_keys, peak_ids, row, CHUNKS, CHUNKS_BLOCK)
            weights = kept_weights(
                logits,
                row,
                chunk * CHUNK + tl.arange(0, CHUNK),
                from_key(highest),
                heat,
                tl.load(min_p + row),
                cut_key,
                tl.load(cut_ids + row),
                COLUMNS,
                TOKENS,
            )
            total = tl.sum(weights, 0)
        tl.store(chunk_sums + row * CHUNKS + chunk, total)


@triton.jit
def sample_draw(
    logits,
    peak_keys,
    peak_ids,
    temperature,
    min_p,
    seeds,
    streams,
    token_indices,
    cut_keys,
    cut_ids,
    chunk_sums,
    token_ids,
    status,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (L,). token_ids, status int32 [L]: see `finish_row`. The likeliest token where the temperature is 0."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    peak, token = row_peak(peak_keys, peak_ids, row, CHUNKS, CHUNKS_BLOCK)
    if (heat > 0) & is_finite(peak):
        chunks = tl.arange(0, CHUNKS_BLOCK)
        sums = tl.load(chunk_sums + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0)
        target = below(tl.sum(sums, 0), row, seeds, streams, token_indices)
        passed = tl.cumsum(sums, 0) <= target
        chunk = tl.sum(passed.to(tl.int32), 0)
        target -= tl.sum(tl.where(passed, sums, 0), 0)
        weights = kept_weights(
            logits,
            row,
            chunk * CHUNK + tl.arange(0, CHUNK),
            from_key(peak),
            heat,
            tl.load(min_p + row),
            tl.load(cut_keys + row),
            tl.load(cut_ids + row),
            COLUMNS,
            TOKENS,
        )
        token = chunk * CHUNK + tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    finish_row(token_ids, status, row, peak, token)
