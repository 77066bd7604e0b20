"""Penalties, bias, allowed and banned tokens: raw logits in, the float32 values out that sampling then looks at.

Lists hold the entries of all rows one after the other: those of row l are at offsets[l] .. offsets[l + 1].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def penalised(x, counts, repetition, frequency, presence):
    """x: float32 logits. counts: int32, see `sampling_counts.py`. The rest: the row's float32 parameters."""
    shrunk = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(counts != 0, shrunk, x)
    generated = counts >> 1
    return tl.where(generated > 0, x - (frequency * generated.to(tl.float32) + presence), x)


@triton.jit
def penalised_at(
    logits,
    counts,
    row,
    owner,
    columns,
    inside,
    repetition,
    frequency,
    presence,
    COLUMNS: tl.constexpr,
):
    """Logits of a row at `columns`, float32, with the row's penalties if it has a row of counts (owner >= 0)."""
    x = tl.load(logits + row * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    if owner >= 0:
        seen = tl.load(counts + owner * COLUMNS + columns, mask=inside, other=0)
        x = penalised(x, seen, tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row))
    return x


@triton.jit
def adjust_logits(
    logits,
    values,
    counts,
    count_rows,
    repetition,
    frequency,
    presence,
    allowed_offsets,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (chunks, L). values float32 [L, COLUMNS] = logits with penalties; -inf in rows with allowed tokens."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < TOKENS
    if tl.load(allowed_offsets + row + 1) > tl.load(allowed_offsets + row):
        x = tl.full([CHUNK], float("-inf"), tl.float32)
    else:
        owner = tl.load(count_rows + row).to(tl.int64)
        x = penalised_at(logits, counts, row, owner, columns, inside, repetition, frequency, presence, COLUMNS)
    tl.store(values + row * COLUMNS + columns, x, mask=inside)


@triton.jit
def adjust_listed(
    logits,
    values,
    counts,
    count_rows,
    repetition,
    frequency,
    presence,
    allowed_offsets,
    allowed_ids,
    bias_offsets,
    bias_ids,
    bias_values,
    banned_offsets,
    banned_ids,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (L,), after `adjust_logits`: brings the allowed tokens back, adds the bias, bans.

    Offsets int32 [L + 1], ids int32, bias_values float32. No row lists a token twice in one list.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    row_values = values + row * COLUMNS
    owner = tl.load(count_rows + row).to(tl.int64)
    end = tl.load(allowed_offsets + row + 1)
    for start in range(tl.load(allowed_offsets + row), end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(allowed_ids + places, mask=places < end, other=0)
        x = penalised_at(logits, counts, row, owner, ids, places < end, repetition, frequency, presence, COLUMNS)
        tl.store(row_values + ids, x, mask=places < end)
    tl.debug_barrier()  # a token may be in several lists, each read by another thread
    end = tl.load(bias_offsets + row + 1)
    for start in range(tl.load(bias_offsets + row), end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(bias_ids + places, mask=places < end, other=0)
        added = tl.load(bias_values + places, mask=places < end, other=0.0)
        tl.store(row_values + ids, tl.load(row_values + ids, mask=places < end) + added, mask=places < end)
    tl.debug_barrier()
    end = tl.load(banned_offsets + row + 1)
    for start in range(tl.load(banned_offsets + row), end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(banned_ids + places, mask=places < end, other=0)
        tl.store(row_values + ids, tl.full([BLOCK], float("-inf"), tl.float32), mask=places < end)
