"""Which few tokens of a row decide where its cuts end, and the list of them.

Top-k: the k-th largest of the peaks of blocks bounds the k-th largest logit from below, so all that are kept are among
the tokens that reach it. Top-p alone: the tokens of the bin in which it ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.sampling_bins import BINS, bin_of
from llmbuild.plugins.kernels.sampling_order import (
    LOWEST_KEY,
    NAN_KEY,
    cuts_of_row,
    exponent,
    from_key,
    is_finite,
    row_peak,
    share_of,
    to_key,
)

LISTED = tl.constexpr(2048)  # tokens that a list holds


@triton.jit
def sample_edges(
    block_keys,
    peak_keys,
    peak_ids,
    bin_weights,
    temperature,
    top_k,
    top_p,
    edges,
    listed,
    above_edge,
    totals,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (L,). block_keys int32 [L, BLOCKS]: the peaks of blocks, as `sample_peaks` leaves them.

    edges int32 [L]: the lowest key (top-k) or the bin (top-p) of the tokens to list; NAN_KEY, which none has, where
    there is nothing to list. listed int32 [L]: 0, or more than LISTED then. above_edge, totals int64 [L], top-p alone:
    weight of the tokens in the bins before, and of all.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    _, cut_k, cut_p = cuts_of_row(row, temperature, top_k, top_p, TOKENS)
    highest, _ = row_peak(peak_keys, peak_ids, row, CHUNKS, CHUNKS_BLOCK)
    edge = tl.full([], NAN_KEY, tl.int32)
    count = LISTED + 1
    if is_finite(highest):
        if cut_k:
            k = tl.load(top_k + row)
            if (k <= BLOCKS) | (TOKENS <= LISTED):
                blocks = tl.arange(0, BLOCKS_BLOCK)
                keys = tl.load(block_keys + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=LOWEST_KEY)
                low = tl.min(keys, 0).to(tl.int64)
                high = highest.to(tl.int64)
                while low < high:  # at least k blocks reach `low`, fewer reach what is above `high`
                    middle = (low + high + 1) >> 1
                    enough = tl.sum((keys >= middle).to(tl.int32), 0) >= k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle - 1)
                edge = tl.where(k <= BLOCKS, low.to(tl.int32), LOWEST_KEY)  # or all of a small vocabulary
                count = 0
        elif cut_p:
            bins = tl.arange(0, BINS)
            weights = tl.load(bin_weights + row * BINS + bins)
            total = tl.sum(weights, 0)
            short = tl.cumsum(weights, 0) < share_of(tl.load(top_p + row), total)
            edge = tl.sum(short.to(tl.int32), 0)
            tl.store(above_edge + row, tl.sum(tl.where(short, weights, 0), 0))
            tl.store(totals + row, total)
            count = 0
    tl.store(edges + row, edge)
    tl.store(listed + row, count)


@triton.jit
def sample_list(
    logits,
    peak_keys,
    peak_ids,
    temperature,
    top_k,
    top_p,
    edges,
    listed,
    list_keys,
    list_ids,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (CHUNKS, L). list_keys, list_ids int32 [L, LISTED]: the tokens, in any order; `listed` counts them.

    More than LISTED are counted but not written.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    heat, cut_k, cut_p = cuts_of_row(row, temperature, top_k, top_p, TOKENS)
    edge = tl.load(edges + row)
    peak = tl.load(peak_keys + row * CHUNKS + chunk)
    if (cut_k & (peak >= edge)) | (cut_p & (cut_k == 0)):
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = columns < TOKENS
        x = tl.load(logits + row * COLUMNS + columns, mask=inside, other=float("-inf")).to(tl.float32)
        keys = to_key(x)
        if cut_k:
            wanted = inside & (keys >= edge)
        else:
            highest, _ = row_peak(peak_keys, peak_ids, row, CHUNKS, CHUNKS_BLOCK)
            wanted = inside & (bin_of(exponent(x, from_key(highest), heat)) == edge)
        ones = wanted.to(tl.int32)
        number = tl.sum(ones, 0)
        if number > 0:
            places = tl.atomic_add(listed + row, number, sem="relaxed") + tl.cumsum(ones, 0) - 1
            wanted = wanted & (places < LISTED)
            tl.store(list_keys + row * LISTED + places, keys, mask=wanted)
            tl.store(list_ids + row * LISTED + places, columns, mask=wanted)
