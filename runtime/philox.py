"""Philox4x32-10: random numbers as a pure function of (seed, counter).

A sequence's i-th token always draws the same number, whatever shares its batch and however often it was preempted.
The generator is the one of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), which GPUs use too,
so that a sampler on a device can be compared with this one bit by bit.
"""

from __future__ import annotations

_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words for a 128-bit counter and a 64-bit key (words, lowest first)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even, odd = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & _MASK, (even >> 32) ^ c3 ^ k1, even & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, stream: int, index: int) -> float:
    """Return a float in [0, 1) with 53 random bits.

    Args:
        seed: 64-bit key.
        stream: Which of a request's n completions.
        index: Which token of the completion.
    """
    high, low, _, _ = philox4x32((index & _MASK, stream & _MASK, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)
