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

    The list of a row stays in registers. Where there is none, each step reads all logits of the row, STEP at once.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    heat, cut_k, cut_p = cuts_of_row(row, temperature, top_k, top_p, TOKENS)
    peak, _ = row_peak(peak_keys, peak_ids, row, CHUNKS, CHUNKS_BLOCK)
    key = tl.full([], LOWEST_KEY, tl.int32)
    token = tl.full([], HIGHEST_ID, tl.int32)
    if (cut_k | cut_p) & is_finite(peak):
        places = tl.arange(0, LISTED)
        count = tl.load(listed + row)
        has_list = count <= LISTED
        inside = has_list & (places < count)
        keys = tl.load(list_keys + row * LISTED + places, mask=inside, other=LOWEST_KEY)
        ids = tl.load(list_ids + row * LISTED + places, mask=inside, other=HIGHEST_ID)
        row_logits = logits + row * COLUMNS
        highest = from_key(peak)
        least = tl.load(min_p + row)
        before = tl.full([], 0, tl.int64)
        if cut_k:
            k = tl.load(top_k + row)
            key, token = find_end(
                keys, ids, inside.to(tl.int64), has_list, row_logits, key, token, highest, heat, least, before,
                k.to(tl.int64), True, TOKENS, STEP,
            )  # fmt: skip
        if cut_p:
            above = exponent(from_key(keys), highest, heat)
            amounts = tl.where(inside & not_after(keys, ids, key, token), to_weight(above, least), 0)
            if cut_k:
                total = measure(
                    keys, ids, amounts, has_list, row_logits, key, token, key, token, highest, heat, least, False,
                    TOKENS, STEP,
                )  # fmt: skip
            else:
                total = tl.load(totals + row)
                before = tl.where(has_list, tl.load(above_edge + row), before)
            key, token = find_end(
                keys, ids, amounts, has_list, row_logits, key, token, highest, heat, least, before,
                share_of(tl.load(top_p + row), total), False, TOKENS, STEP,
            )  # fmt: skip
    tl.store(cut_keys + row, key)
    tl.store(cut_ids + row, token)


@triton.jit
def measure(
    keys,
    ids,
    amounts,
    has_list,
    row_logits,
    key,
    token,
    cut_key,
    cut_id,
    highest,
    heat,
    least,
    COUNT: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the sum of what is in the order up to (key, token): the listed amounts, int64, or of the row the number
    (COUNT) or the weights of the tokens up to (cut_key, cut_id)."""
    if has_list:
        total = tl.sum(tl.where(not_after(keys, ids, key, token), amounts, 0), 0)
    else:
        sums = tl.zeros([STEP], tl.int64)
        for start in range(0, TOKENS, STEP):
            at = start + tl.arange(0, STEP)
            x = tl.load(row_logits + at, mask=at < TOKENS, other=0.0).to(tl.float32)
            here = to_key(x)
            kept = (at < TOKENS) & not_after(here, at, key, token) & not_after(here, at, cut_key, cut_id)
            if COUNT:
                sums += kept.to(tl.int64)
            else:
                sums += tl.where(kept, to_weight(exponent(x, highest, heat), least), 0)
        total = tl.sum(sums, 0)
    return total


@triton.jit
def extent(
    keys,
    ids,
    amounts,
    has_list,
    row_logits,
    key,
    cut_key,
    cut_id,
    BY_ID: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the least and the greatest key of what is measured, or (BY_ID) id of what has this key."""
    if has_list:
        values = keys
        kept = amounts > 0
        if BY_ID:
            values = ids
            kept = kept & (keys == key)
        least = tl.min(tl.where(kept, values, HIGHEST_ID), 0)
        greatest = tl.max(tl.where(kept, values, LOWEST_KEY), 0)
    else:
        lows = tl.full([STEP], HIGHEST_ID, tl.int32)
        highs = tl.full([STEP], LOWEST_KEY, tl.int32)
        for start in range(0, TOKENS, STEP):
            at = start + tl.arange(0, STEP)
            here = to_key(tl.load(row_logits + at, mask=at < TOKENS, other=0.0).to(tl.float32))
            kept = (at < TOKENS) & not_after(here, at, cut_key, cut_id)
            values = here
            if BY_ID:
                kept = kept & (here == key)
                values = at
            lows = tl.minimum(lows, tl.where(kept, values, HIGHEST_ID))
            highs = tl.maximum(highs, tl.where(kept, values, LOWEST_KEY))
        least = tl.min(lows, 0)
        greatest = tl.max(highs, 0)
    return least, greatest


@triton.jit
def find_end(
    keys,
    ids,
    amounts,
    has_list,
    row_logits,
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
    """Return (key, id) of the first token, in the order, at which before + measure reaches `wanted`.

    All that is measured together reaches it.
    """
    low, high = extent(keys, ids, amounts, has_list, row_logits, 0, cut_key, cut_id, False, TOKENS, STEP)
    bottom = low.to(tl.int64)  # the sum of two keys may need 33 bits
    top = high.to(tl.int64)
    while bottom < top:
        middle = ((bottom + top + 1) >> 1).to(tl.int32)
        reached = before + measure(
            keys, ids, amounts, has_list, row_logits, middle, HIGHEST_ID, cut_key, cut_id, highest, heat, least,
            COUNT, TOKENS, STEP,
        ) >= wanted  # fmt: skip
        bottom = tl.where(reached, middle.to(tl.int64), bottom)
        top = tl.where(reached, top, middle.to(tl.int64) - 1)
    key = bottom.to(tl.int32)
    first, last = extent(keys, ids, amounts, has_list, row_logits, key, cut_key, cut_id, True, TOKENS, STEP)
    while first < last:
        middle = (first + last) >> 1
        reached = before + measure(
            keys, ids, amounts, has_list, row_logits, key, middle, cut_key, cut_id, highest, heat, least,
            COUNT, TOKENS, STEP,
        ) >= wanted  # fmt: skip
        last = tl.where(reached, middle, last)
        first = tl.where(reached, first, middle + 1)
    return key, first
