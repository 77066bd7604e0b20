"""Sorts what tokens ask of experts into blocks of rows, each of one expert: the same order each time.

A pair is a token and one of its experts, numbered t * TOP_K + k. Each expert's pairs, in order, fill its blocks of
BLOCK_M rows; the last is filled up with -1. Blocks that no expert needs belong to expert -1.

    BLOCK_M 4, ids [[2, 0], [2, 1], [0, 2]]:
    block_experts   0          1          2          -1
    order           1 4 -1 -1  3 -1 -1 -1  0 2 5 -1
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.gemm_shape import power_of_2
from llmbuild.plugins.kernels.moe_shape import ExpertsShape
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of

FILL = tl.constexpr(128)  # blocks that are labelled at once


@triton.jit(do_not_specialize=["tokens"])
def sort_pairs(
    ids,
    order,
    block_experts,
    tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (EXPERTS,). Every program counts all pairs, and then places those of its own expert.

    ids [tokens, TOP_K]; one that is no expert is placed nowhere. order int32 [blocks * BLOCK_M], block_experts int32
    [blocks], with pairs // BLOCK_M + min(EXPERTS, pairs) blocks: no batch needs more.
    """
    expert = tl.program_id(0)
    pairs = tokens * TOP_K
    bins = tl.arange(0, BINS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        counts += tl.histogram(chosen, BINS, mask=(chosen >= 0) & (chosen < EXPERTS))
    blocks = (counts + (BLOCK_M - 1)) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    own = tl.sum(tl.where(bins == expert, blocks, 0), 0)

    place = first * BLOCK_M
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        match = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(match, 0) - 1, pair, mask=match > 0)
        place += tl.sum(match, 0)
    rest = place + tl.arange(0, BLOCK_M)
    tl.store(order + rest, -1, mask=rest < (first + own) * BLOCK_M)

    label(block_experts, first, first + own, expert)
    if expert == EXPERTS - 1:
        label(block_experts, first + own, pairs // BLOCK_M + tl.minimum(pairs, EXPERTS), -1)


@triton.jit
def label(block_experts, begin, end, expert):
    for start in range(begin, end, FILL):
        block = start + tl.arange(0, FILL)
        tl.store(block_experts + block, expert, mask=block < end)


def blocks_text(shape: ExpertsShape, block_m: int) -> str:
    """Blocks at most, an expression in T."""
    return f"(T * {shape.top_k} // {block_m} + min({shape.experts}, T * {shape.top_k}))"


def sort_spec(shape: ExpertsShape, *, name: str, block_m: int, chunk: int, present: str, pdl: bool) -> KernelSpec:
    """Return the kernel. chunk: pairs read at once. present: 1, or 0 for the T for which it is not launched."""
    constants = {
        "EXPERTS": shape.experts,
        "TOP_K": shape.top_k,
        "BINS": power_of_2(shape.experts),
        "BLOCK_M": block_m,
        "CHUNK": chunk,
        "PDL": pdl,
    }
    return KernelSpec(
        name,
        sort_pairs,
        **arguments_of(sort_pairs, shape.types(), constants),
        grid=(str(shape.experts), "1", present),
        num_warps=4,
        num_stages=1,
        options={"launch_pdl": True} if pdl else {},
    )
