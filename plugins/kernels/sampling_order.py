"""What all sampling kernels agree on: how logits are ordered, what a token weighs, and which tokens a cut keeps.

    order   float32 logits as int32 keys: comparing keys is comparing logits, ties go to the lower id
    weight  exp((logit - highest) / temperature) in units of 2**-44, an int64: the highest weighs 2**44

Sums of integers are exact, so that they do not depend on who adds first, and neither does the token that is drawn.
What weighs less than 2**-44 of the likeliest token is never drawn. At most 2**18 tokens fit into the 63 bits of a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_TOKENS = 1 << 18
LOWEST_KEY = tl.constexpr(-(2**31))  # below the key of every number
HIGHEST_ID = tl.constexpr(2**31 - 1)
INFINITY_KEY = tl.constexpr(0x7F800000)
MINUS_INFINITY_KEY = tl.constexpr(0x7F800000 ^ -1)
NAN_KEY = tl.constexpr(0x7FFFFFFF)
WEIGHT_UNIT = tl.constexpr(2.0**44)


@triton.jit
def to_key(x):
    """float32 -> int32 of the same order. Both zeros are one, NaN is above everything."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def from_key(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(key):
    return (key > MINUS_INFINITY_KEY) & (key < INFINITY_KEY)


@triton.jit
def exponent(x, highest, temperature):
    """Logits above the highest, in temperatures: 0 or less. The highest's own is 0 even where a GPU takes a very small
    temperature for 0."""
    return tl.where(x == highest, 0.0, tl.div_rn(x - highest, temperature))


@triton.jit
def to_weight(above, min_p):
    """Weight of a token for its `exponent`; 0 for less than min_p of the likeliest."""
    weight = tl.exp(above)
    return (tl.where(weight < min_p, 0.0, weight) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def not_after(key, token, cut_key, cut_id):
    """Whether a token is at the cut or before it in the order: likelier, or as likely with an id that is not higher."""
    return (key > cut_key) | ((key == cut_key) & (token <= cut_id))


@triton.jit
def row_peak(peak_keys, peak_ids, row, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """Return (key, id) of a row's likeliest token from the peaks of its chunks."""
    chunks = tl.arange(0, CHUNKS_BLOCK)
    keys = tl.load(peak_keys + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=LOWEST_KEY)
    ids = tl.load(peak_ids + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=HIGHEST_ID)
    highest = tl.max(keys, 0)
    return highest, tl.min(tl.where(keys == highest, ids, HIGHEST_ID), 0)


@triton.jit
def cuts_of_row(row, temperature, top_k, top_p, TOKENS: tl.constexpr):
    """Return (temperature, whether top-k cuts, whether top-p cuts) of a row. A greedy row has no cuts."""
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    return heat, (heat > 0) & (k > 0) & (k < TOKENS), (heat > 0) & (tl.load(top_p + row) < 1.0)


@triton.jit
def share_of(p, total):
    """Return the least int64 that reaches p * total, exactly, and at least 1. p: float32 in [0, 1)."""
    share = (p * 9223372036854775808.0).to(tl.int64).to(tl.uint64) << 1  # in units of 2**-64
    whole = tl.umulhi(share, total.to(tl.uint64)).to(tl.int64)
    rest = share * total.to(tl.uint64)
    return tl.maximum(whole + (rest != 0).to(tl.int64), 1)
