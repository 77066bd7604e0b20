"""Where a row's cuts end, exactly: the last token that top-k and top-p keep, found by halving.

Kept is a beginning of the order: all tokens that are likelier than the last one, and of those as likely the ones whose
id is not higher. A measure, the number of tokens or their weight, grows along the order; the end is where it reaches
what is wanted.

    keys:  high ------------------ end ------------------ low        measure(key) = sum of what is at key or above
            measure < wanted        | measure >= wanted
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.sampling_edges import LISTED
from llmbuild.plugins.kernels.sampling_order import (
    HIGHEST_ID,
    LOWEST_KEY,
    cuts_of_row,
    exponent,
    from_key,
    is_finite,
    not_after,
    row_peak,
    share_of,
    to_key,
    to_weight,
)


@triton.jit
def sample_cuts(
    logits,
    peak_keys,
    peak_ids,
    temperature,
    top_k,
    top_p,
    min_p,
    listed,
    list_keys,
    list_ids,
    above_edge,
    totals,
    cut_keys,
    cut_ids,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (L,). cut_keys, cut_ids int32 [L]: key and id of the last token that is kept.

    Reads the list of a row, or all of its logits where there is none, STEP tokens at once.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    heat, cut_k, k, cut_p, p = cuts_of_row(row, temperature, top_k, top_p, TOKENS)
    peak, _ = row_peak(peak_keys, peak_ids, row, CHUNKS, CHUNKS_BLOCK)
    key = tl.full([], LOWEST_KEY, tl.int32)
    token = tl.full([], HIGHEST_ID, tl.int32)
    if (cut_k | cut_p) & is_finite(peak):
        count = tl.load(listed + row)
        has_list = count <= LISTED
        length = tl.where(has_list, count, TOKENS)
        row_logits = logits + row * COLUMNS
        keys = list_keys + row * LISTED
        ids = list_ids + row * LISTED
        highest = from_key(peak)
        least = tl.load(min_p + row)
        before = tl.full([], 0, tl.int64)
        if cut_k:
            key, token = find_end(
                row_logits, keys, ids, has_list, length, key, token, highest, heat, least, before, k.to(tl.int64),
                True, TOKENS, STEP,
            )  # fmt: skip
        if cut_p:
            if cut_k:
                total = measure(
                    row_logits, keys, ids, has_list, length, key, token, key, token, highest, heat, least, False, STEP
                )
            elif has_list:
                total = tl.load(totals + row)
                before = tl.load(above_edge + row)
            else:
                total = tl.load(totals + row)
            key, token = find_end(
                row_logits, keys, ids, has_list, length, key, token, highest, heat, least, before, share_of(p, total),
                False, TOKENS, STEP,
            )  # fmt: skip
    tl.store(cut_keys + row, key)
    tl.store(cut_ids + row, token)


@triton.jit
def candidates(row_logits, list_keys, list_ids, has_list, at, inside):
    """Return (keys, ids) of the entries `at` of a list, or of the columns `at` of a row."""
    if has_list:
        keys = tl.load(list_keys + at, mask=inside, other=LOWEST_KEY)
        ids = tl.load(list_ids + at, mask=inside, other=HIGHEST_ID)
    else:
        keys = to_key(tl.load(row_logits + at, mask=inside, other=0.0).to(tl.float32))
        ids = at
    return keys, ids


@triton.jit
def measure(
    row_logits,
    list_keys,
    list_ids,
    has_list,
    length,
    key,
    token,
    cut_key,
    cut_id,
    highest,
    heat,
    least,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the number (COUNT) or the weight of the candidates up to (key, token), and up to (cut_key, cut_id)."""
    sums = tl.zeros([STEP], tl.int64)
    for start in range(0, length, STEP):
        at = start + tl.arange(0, STEP)
        keys, ids = candidates(row_logits, list_keys, list_ids, has_list, at, at < length)
        kept = (at < length) & not_after(keys, ids, key, token) & not_after(keys, ids, cut_key, cut_id)
        if COUNT:
            sums += kept.to(tl.int64)
        else:
            sums += tl.where(kept, to_weight(exponent(from_key(keys), highest, heat), least), 0)
    return tl.sum(sums, 0)


@triton.jit
def extent(
    row_logits, list_keys, list_ids, has_list, length, key, cut_key, cut_id, BY_ID: tl.constexpr, STEP: tl.constexpr
):
    """Return the least and the greatest key of the candidates up to the cut, or id (BY_ID) of those with this key."""
    least = tl.full([STEP], HIGHEST_ID, tl.int32)
    greatest = tl.full([STEP], LOWEST_KEY, tl.int32)
    for start in range(0, length, STEP):
        at = start + tl.arange(0, STEP)
        keys, ids = candidates(row_logits, list_keys, list_ids, has_list, at, at < length)
        kept = (at < length) & not_after(keys, ids, cut_key, cut_id)
        values = keys
        if BY_ID:
            kept = kept & (keys == key)
            values = ids
        least = tl.minimum(least, tl.where(kept, values, HIGHEST_ID))
        greatest = tl.maximum(greatest, tl.where(kept, values, LOWEST_KEY))
    return tl.min(least, 0), tl.max(greatest, 0)


@triton.jit
def find_end(
    row_logits,
    list_keys,
    list_ids,
    has_list,
    length,
    cut_key,
    cut_id,
    highest,
    heat,
    least,
    before,
    wanted,
    COUNT: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return (key, id) of the first candidate, in the order, at which before + measure reaches `wanted`.

    Only candidates up to (cut_key, cut_id) count; all of them together reach it.
    """
    low, high = extent(row_logits, list_keys, list_ids, has_list, length, cut_key, cut_key, cut_id, False, STEP)
    bottom = low.to(tl.int64)  # what lies between two keys may need 33 bits
    top = high.to(tl.int64)
    while bottom < top:
        middle = ((bottom + top + 1) >> 1).to(tl.int32)
        reached = before + measure(
            row_logits, list_keys, list_ids, has_list, length, middle, HIGHEST_ID, cut_key, cut_id, highest, heat,
            least, COUNT, STEP,
        ) >= wanted  # fmt: skip
        bottom = tl.where(reached, middle.to(tl.int64), bottom)
        top = tl.where(reached, top, middle.to(tl.int64) - 1)
    key = bottom.to(tl.int32)
    first, last = extent(row_logits, list_keys, list_ids, has_list, length, key, cut_key, cut_id, True, STEP)
    while first < last:
        middle = (first + last) >> 1
        reached = before + measure(
            row_logits, list_keys, list_ids, has_list, length, key, middle, cut_key, cut_id, highest, heat,
            least, COUNT, STEP,
        ) >= wanted  # fmt: skip
        last = tl.where(reached, middle, last)
        first = tl.where(reached, first, middle + 1)
    return key, first
