"""Feeds sampled tokens to the next step on the device, so that the host need not wait for them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def feed_tokens(token_ids, feed_sources, input_ids, tokens, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: (cdiv(T, BLOCK),). input_ids[i] = token_ids[feed_sources[i]] where that is not negative, for i < tokens.

    token_ids int32 [L of the step before]; feed_sources int32 [T]; input_ids int32 [T].
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sources = tl.load(feed_sources + places, mask=places < tokens, other=-1)
    tl.store(input_ids + places, tl.load(token_ids + sources, mask=sources >= 0), mask=sources >= 0)
