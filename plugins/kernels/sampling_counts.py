"""What penalties know of a sequence, kept on the device: an int32 for each token of the vocabulary.

    counts[row, token] = 2 * how often the token was generated + (1 if the prompt holds it)

A sequence with penalties owns a row. The row is written when the sequence enters, or enters again after a preemption,
and each sampled token is counted where it was sampled. Rows of other sequences are -1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clear_counts(counts, entering, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: (cdiv(COLUMNS, BLOCK),). Zeroes the row entering[0] if entering[3] is 1; see `enter_counts`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(entering + 3) == 1:
        row = tl.load(entering).to(tl.int64)
        tl.store(counts + row * COLUMNS + columns, tl.zeros([BLOCK], tl.int32), mask=columns < COLUMNS)


@triton.jit
def enter_counts(counts, entering, entering_ids, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Counts tokens of a sequence. Grid: (cdiv(capacity of entering_ids, BLOCK),).

    entering int32 [4]: the row of counts, how many ids there are, how many of them, at the start, belong to the
    prompt, and 1 if the row begins here (of a long sequence, only with its first ids). entering_ids int32.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(entering).to(tl.int64)
    number = tl.load(entering + 1)
    prompt = tl.load(entering + 2)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < number
    ids = tl.load(entering_ids + places, mask=inside, other=0)
    tl.atomic_or(counts + row * COLUMNS + ids, 1, mask=inside & (places < prompt), sem="relaxed")
    tl.atomic_add(counts + row * COLUMNS + ids, 2, mask=inside & (places >= prompt), sem="relaxed")


@triton.jit
def update_counts(counts, count_rows, token_ids, rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Counts the tokens that were sampled. Grid: (cdiv(L, BLOCK),). rows: L.

    count_rows int32 [L]: which row of counts a row of logits has, -1 for none; no two have the same. token_ids int32
    [L].
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owners = tl.load(count_rows + places, mask=places < rows, other=-1)
    counted = owners >= 0
    ids = tl.load(token_ids + places, mask=counted, other=0)
    cells = counts + owners.to(tl.int64) * COLUMNS + ids
    tl.store(cells, tl.load(cells, mask=counted, other=0) + 2, mask=counted)
