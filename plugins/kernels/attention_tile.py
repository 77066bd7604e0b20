"""Queries against a range of cached keys, with every feature of `llmbuild::paged_attention`: the loop of both kernels.

Scores are kept in base 2 (exp2 is one instruction) and in float32. A row's softmax is carried as `peak`, its largest
score so far, `total`, its sum of exp2(score - peak), and `acc`, the values weighted with the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.float8 import e4m3_to_float32

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(
    pointer,
    slots,
    present,
    ROW: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[slots, BLOCK]: channels FIRST.. of rows that lie ROW elements apart. Zero past WIDTH and where not present."""
    channels = FIRST + tl.arange(0, BLOCK)
    rows = pointer + slots[:, None] * ROW + channels[None, :]
    if FIRST + BLOCK > WIDTH:
        if MASKED:
            block = tl.load(rows, mask=present[:, None] & (channels[None, :] < WIDTH), other=0.0)
        else:
            block = tl.load(rows, mask=channels[None, :] < WIDTH, other=0.0)
    else:
        if MASKED:
            block = tl.load(rows, mask=present[:, None], other=0.0)
        else:
            block = tl.load(rows)
    return block


@triton.jit
def widened(block, dtype: tl.constexpr):
    """What a block of a pool stands for, scales aside, in the queries' type: exact for pools of bytes."""
    if block.dtype == tl.uint8:
        result = e4m3_to_float32(block).to(dtype)
    else:
        result = block.to(dtype)
    return result


@triton.jit
def in_float16(q, q_rest, REST_BLOCK: tl.constexpr):
    """Queries in float16, and the powers of 2 [M] that their rows were divided by, so that none is too large for it."""
    wide = q.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    if REST_BLOCK > 0:
        rest = q_rest.to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power > 0.0, power, 1.0)
    half = (wide / power[:, None]).to(tl.float16)
    half_rest = half
    if REST_BLOCK > 0:
        half_rest = (rest / power[:, None]).to(tl.float16)
    return half, half_rest, power


@triton.jit
def attend_range(
    acc,
    total,
    peak,
    q,
    q_rest,
    query_positions,
    row_slopes,
    table,
    keys,
    values,
    k_scales,
    v_scales,
    begin,
    end,
    lowest,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_SCALES: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Go on with (acc, total, peak) over the keys at positions begin .. end - 1, and return them.

    acc [M, VALUE_BLOCK], total [M], peak [M] float32; q [M, HEAD_BLOCK] the first channels, q_rest [M, REST_BLOCK] the
    others if REST_BLOCK > 0; query_positions [M]; row_slopes [M] float32 or None. `table` points at the sequence's
    row of the block table; `keys`, `values` and the scales at the KV head.
    MASKED: causality, the window and the ends are looked at; without it every row sees every key of the range, whose
    length is a multiple of BLOCK_N. Keys below `lowest` are outside of every row's window: their blocks may be gone.
    KV_SCALES: "none"; "layer": one factor of all keys and one of all values; "token": one per slot and head. With
    "layer", queries of bfloat16 are multiplied in float16.
    """
    if SOFTCAP is not None or row_slopes is not None:
        factor = LOG2E * 1.0  # the scale is applied before
    else:
        factor = SCALE * LOG2E
    if KV_SCALES == "layer":
        k_scale = tl.load(k_scales)
        if q.dtype == tl.bfloat16:
            # GPUs convert e4m3 to float16, and from there to bfloat16 at a small part of that speed. Weights are at
            # most 1 here, where no scale of a token multiplies them: float16 holds them too.
            q, q_rest, power = in_float16(q, q_rest, REST_BLOCK)
            k_scale = power[:, None] * k_scale
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        present = (positions >= lowest) & (positions < end)
        if MASKED:
            blocks = tl.load(table + positions // PAGE, mask=present, other=0)
        else:
            blocks = tl.load(table + positions // PAGE)
        slots = blocks.to(tl.int64) * PAGE + positions % PAGE

        k = load_rows(keys, slots, present, KV_HEADS * HEAD_DIM, 0, HEAD_DIM, HEAD_BLOCK, MASKED)
        scores = tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee")
        if REST_BLOCK > 0:
            rest = load_rows(keys, slots, present, KV_HEADS * HEAD_DIM, HEAD_BLOCK, HEAD_DIM, REST_BLOCK, MASKED)
            scores = tl.dot(q_rest, tl.trans(widened(rest, q.dtype)), scores, input_precision="ieee")
        if KV_SCALES == "layer":
            scores *= k_scale
        if KV_SCALES == "token":
            scores *= tl.load(k_scales + slots * KV_HEADS, mask=present, other=0.0)[None, :]
        distance = positions[None, :] - query_positions[:, None]
        if SOFTCAP is not None:
            # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where the exponential is inf or 0
            scores = SOFTCAP - (2.0 * SOFTCAP) / (tl.exp2(scores * (2.0 * SCALE / SOFTCAP * LOG2E)) + 1.0)
        elif row_slopes is not None:
            scores *= SCALE
        if row_slopes is not None:
            scores += row_slopes[:, None] * distance.to(tl.float32)
        if MASKED:
            visible = present[None, :] & (distance <= 0)
            if WINDOW is not None:
                visible &= distance > -WINDOW
            scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        base = new_peak
        if MASKED:
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key seen yet: exp2(-inf - 0) = 0, not nan
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if KV_SCALES == "token":
            weights *= tl.load(v_scales + slots * KV_HEADS, mask=present, other=0.0)[None, :]
        v = load_rows(values, slots, present, KV_HEADS * VALUE_DIM, 0, VALUE_DIM, VALUE_BLOCK, MASKED)
        acc = tl.dot(weights.to(q.dtype), widened(v, q.dtype), acc, input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def store_result(
    out,
    q_rows,
    head,
    live,
    acc,
    total,
    peak,
    sinks,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Take the sinks in, if there are any, and store the live rows of a tile that has seen all of its keys."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head, mask=live, other=0.0) * LOG2E - peak)
    channels = tl.arange(0, VALUE_BLOCK)
    mask = live[:, None] & (channels[None, :] < VALUE_DIM)
    result = acc / total[:, None]
    tl.store(out + q_rows[:, None] * VALUE_DIM + channels[None, :], result.to(out.dtype.element_ty), mask=mask)
