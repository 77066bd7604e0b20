"""The likeliest token of each row: peaks of chunks of the vocabulary side by side, then one of the peaks.

The first kernel also begins full sampling. It leaves the peaks of blocks of 64 columns, which bound what top-k keeps,
and clears the bins of top-p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.sampling_order import HIGHEST_ID, LOWEST_KEY, is_finite, row_peak, to_key


@triton.jit
def sample_peaks(
    logits,
    peak_keys,
    peak_ids,
    block_keys,
    bin_weights,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    BINS_EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (CHUNKS, L). A program takes CHUNK columns of a row.

    logits [L, COLUMNS], of which the first TOKENS count; peak_keys, peak_ids int32 [L, CHUNKS]: the chunk's likeliest
    token. For full sampling, else None: block_keys int32 [L, CHUNKS * CHUNK / BLOCK], bin_weights int64 [L, BINS].
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < TOKENS
    x = tl.load(logits + row * COLUMNS + columns, mask=inside).to(tl.float32)
    keys = tl.where(inside, to_key(x), LOWEST_KEY)
    if block_keys is None:
        highest = tl.max(keys, 0)
    else:
        PARTS: tl.constexpr = CHUNK // BLOCK
        peaks = tl.max(tl.reshape(keys, [PARTS, BLOCK]), 1)
        tl.store(block_keys + (row * CHUNKS + chunk) * PARTS + tl.arange(0, PARTS), peaks)
        highest = tl.max(peaks, 0)
        bins = chunk * BINS_EACH + tl.arange(0, BINS_EACH)
        tl.store(bin_weights + row * BINS + bins, tl.zeros([BINS_EACH], tl.int64), mask=bins < BINS)
    tl.store(peak_keys + row * CHUNKS + chunk, highest)
    tl.store(peak_ids + row * CHUNKS + chunk, tl.min(tl.where(keys == highest, columns, HIGHEST_ID), 0))


@triton.jit
def sample_greedy(
    peak_keys,
    peak_ids,
    token_ids,
    status,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (L,). token_ids, status int32 [L]: see `finish_row`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    highest, likeliest = row_peak(peak_keys, peak_ids, row, CHUNKS, CHUNKS_BLOCK)
    finish_row(token_ids, status, row, highest, likeliest)


@triton.jit
def finish_row(token_ids, status, row, highest, token):
    """Write a row's token with status 0. A row with a NaN, +inf or nothing but -inf gets status 1 and token 0: a legal
    id, since the next step may embed it before the host has seen the status."""
    good = is_finite(highest)
    tl.store(token_ids + row, tl.where(good, token, 0))
    tl.store(status + row, tl.where(good, 0, 1))
