"""A first, coarse answer to where top-p ends: the weights of a row by how far below the highest logit they are.

    bin:   0          1          2      ...     BINS - 2   BINS - 1
           |----------|----------|--    ...   --|----------|------------- all the rest --->
           0         1/64       2/64                     16                temperatures below the highest

Bins follow the order of the logits, so the end lies in the first bin at which the running sum reaches what top-p asks
for, and only the tokens of this bin have to be looked at one by one. Rows that top-k cuts do without: see
`sampling_edges.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.sampling_order import cuts_of_row, exponent, from_key, is_finite, row_peak, to_weight

BINS = tl.constexpr(1024)
BINS_PER_TEMPERATURE = tl.constexpr(64.0)


@triton.jit
def bin_of(above):
    """The bin of a token for its `exponent`."""
    return tl.minimum(-above * BINS_PER_TEMPERATURE, BINS - 1.0).to(tl.int32)


@triton.jit
def sample_bins(
    logits,
    peak_keys,
    peak_ids,
    temperature,
    top_k,
    top_p,
    min_p,
    bin_weights,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (CHUNKS, L). Adds the weights of a chunk to bin_weights int64 [L, BINS], for rows that top-p alone cuts."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    heat, cut_k, cut_p = cuts_of_row(row, temperature, top_k, top_p, TOKENS)
    highest, _ = row_peak(peak_keys, peak_ids, row, CHUNKS, CHUNKS_BLOCK)
    if cut_p & (cut_k == 0) & is_finite(highest):
        columns = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        inside = columns < TOKENS
        x = tl.load(logits + row * COLUMNS + columns, mask=inside, other=float("-inf")).to(tl.float32)
        above = exponent(x, from_key(highest), heat)
        weights = to_weight(above, tl.load(min_p + row))
        bins = bin_of(above)
        # Most of a vocabulary is in the last bin: it is summed here instead of one atomic after the other.
        last = bins == BINS - 1
        tl.atomic_add(bin_weights + row * BINS + bins, weights, mask=(weights > 0) & (last == 0), sem="relaxed")
        rest = tl.sum(tl.where(last, weights, 0), 0)
        tl.atomic_add(bin_weights + row * BINS + BINS - 1, rest, mask=rest > 0, sem="relaxed")
