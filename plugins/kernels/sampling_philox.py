"""Philox4x32-10 in a kernel: the words of `llmbuild.runtime.philox`, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return four random uint32 for a counter of four and a key of two uint32, lowest words first."""
    for _ in tl.static_range(10):
        even_low = c0 * tl.full([], 0xD2511F53, tl.uint32)
        even_high = tl.umulhi(c0, tl.full([], 0xD2511F53, tl.uint32))
        odd_low = c2 * tl.full([], 0xCD9E8D57, tl.uint32)
        odd_high = tl.umulhi(c2, tl.full([], 0xCD9E8D57, tl.uint32))
        c0 = odd_high ^ c1 ^ k0
        c1 = odd_low
        c2 = even_high ^ c3 ^ k1
        c3 = even_low
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def below(total, row, seeds, streams, token_indices):
    """Return floor(u * total) for the row's random number u in [0, 1) of 53 bits, exactly; total: int64, positive.

    seeds int32 [2 L], the lower word of each first; streams, token_indices int32 [L].
    """
    k0 = tl.load(seeds + 2 * row).to(tl.uint32, bitcast=True)
    k1 = tl.load(seeds + 2 * row + 1).to(tl.uint32, bitcast=True)
    c0 = tl.load(token_indices + row).to(tl.uint32, bitcast=True)
    c1 = tl.load(streams + row).to(tl.uint32, bitcast=True)
    zero = tl.full([], 0, tl.uint32)
    high, low, _, _ = philox4x32(c0, c1, zero, zero, k0, k1)
    bits = ((high >> 5).to(tl.uint64) << 26) | (low >> 6).to(tl.uint64)
    return tl.umulhi(bits << 11, total.to(tl.uint64)).to(tl.int64)
