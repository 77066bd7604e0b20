"""What a token's experts gave, weighed by its scores and summed in the order of the router."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_experts(
    results,
    scores,
    out,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = Σ_k scores[t, k] · results[t * TOP_K + k], in float32. Grid: (T, cdiv(HIDDEN, BLOCK)).

    results [T * TOP_K, HIDDEN], scores [T, TOP_K], out [T, HIDDEN].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        row = tl.load(results + pair * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        total += row * tl.load(scores + pair).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, total.to(out.dtype.element_ty), mask=inside)
