"""Attention in standard operators, for engines without native ones.

Every sequence of a run brings the same number of tokens Q, so T = B·Q and nothing is padded on the query side; the
executor runs a mixed step as several such runs. Host arrays of a run:

    batch_shape [2] int64         (B, Q)
    cache_slots [B, L] int64      slots of each sequence's positions 0 .. L - 1 (anything past its length)
    new_slots.H [T, H, 2] int64   (kv head, slot) where each token's K and V go, for layers of H kv heads
    mask.W [B, Q, 1, L] float     0 where the query may see the key, -inf elsewhere, for a window of W (0: none)
    distance [B, Q, 1, L] float   key position - query position, for ALiBi

Pools are [Hkv, slots, D]: gathering along the slots gives each head's keys in one piece. ScatterND's output is bound to
the buffer of its input, which makes it an update in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto
from torch import fx

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cpu.lower.attention_paged import pool_names
from llmbuild.builder.targets.onnx_graph.emitter import CONTRIB, Emitter
from llmbuild.builder.targets.onnx_graph.rule import reshape

ALIBI_INPUT = "distance"


def attention(e: Emitter, node: fx.Node) -> str:
    q, k, v, layer, scale, window, softcap, sinks, slopes, *_ = arguments(node)
    q_heads, kv_heads = int(size(q)[1]), int(size(k)[1])
    group, width, value_width = q_heads // kv_heads, int(size(k)[2]), int(size(v)[2])
    keys, values = (
        cached(e, pool, e.tensor(new), kv_heads, int(size(new)[2]))
        for pool, new in zip(pool_names(layer), (k, v), strict=True)
    )

    rows = queries(e, e.tensor(q), kv_heads, group, width)  # [Hkv, B, Q·G, D]
    scores = e.op("FusedMatMul", rows, keys, domain=CONTRIB, transB=1, alpha=float(scale))
    scores = with_batch_shape(e, scores, (kv_heads,), (group, -1))  # [Hkv, B, Q, G, L]
    if softcap is not None:
        cap = e.constant(np.float32(softcap))
        scores = e.op("Mul", e.op("Tanh", e.op("Div", scores, cap)), cap)
    if slopes is not None:
        distance = e.add_input(ALIBI_INPUT, TensorProto.FLOAT, ["B", "Q", 1, "L"])
        by_head = reshape(e, e.tensor(slopes), kv_heads, 1, 1, group, 1)
        scores = e.op("Add", scores, e.op("Mul", by_head, distance))
    mask = e.add_input(f"mask.{window or 0}", TensorProto.FLOAT, ["B", "Q", 1, "L"])
    weights = soften(e, e.op("Add", scores, mask), sinks, kv_heads, group)
    weights = e.op("Reshape", weights, e.shared(("rows", kv_heads, group), lambda: row_shape(e, kv_heads, group)))
    out = e.op("MatMul", weights, values)  # [Hkv, B, Q·G, Dv]
    out = with_batch_shape(e, out, (kv_heads,), (group, value_width))
    return reshape(e, e.op("Transpose", out, perm=[1, 2, 0, 3, 4]), -1, q_heads, value_width)


def cached(e: Emitter, pool: str, new: str, heads: int, width: int) -> str:
    """Append `new` [T, H, D] to a pool and return the sequences' rows of it, [H, B, L, D]."""
    e.add_input(pool, TensorProto.FLOAT, [heads, "slots", width])
    target = e.add_input(f"new_slots.{heads}", TensorProto.INT64, ["T", heads, 2])
    slots = e.add_input("cache_slots", TensorProto.INT64, ["B", "L"])
    updated = e.op("ScatterND", pool, target, new)
    e.rename(updated, f"{pool}.out")
    e.add_output(f"{pool}.out", TensorProto.FLOAT, [heads, "slots", width])
    return e.op("Gather", f"{pool}.out", slots, axis=1)


def queries(e: Emitter, q: str, kv_heads: int, group: int, width: int) -> str:
    """[T, Hq, D] -> [Hkv, B, Q·G, D]"""
    apart = with_batch_shape(e, q, (), (kv_heads, group, width))
    by_head = e.op("Transpose", apart, perm=[2, 0, 1, 3, 4])
    return e.op("Reshape", by_head, e.shared(("rows", kv_heads, group), lambda: row_shape(e, kv_heads, group)))


def with_batch_shape(e: Emitter, name: str, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Reshape to [*before, B, Q, *after]."""
    return e.op("Reshape", name, batched(e, before, after))


def batched(e: Emitter, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """The shape [*before, B, Q, *after], made once for all layers."""

    def shape() -> str:
        parts = [e.ints(*before)] if before else []
        return e.op("Concat", *parts, batch_shape(e), e.ints(*after), axis=0)

    return e.shared(("batch", before, after), shape)


def row_shape(e: Emitter, kv_heads: int, group: int) -> str:
    """[Hkv, B, Q·G, -1]"""
    b = e.op("Gather", batch_shape(e), e.ints(0))
    q = e.op("Mul", e.op("Gather", batch_shape(e), e.ints(1)), e.ints(group))
    return e.op("Concat", e.ints(kv_heads), b, q, e.ints(-1), axis=0)


def batch_shape(e: Emitter) -> str:
    return e.add_input("batch_shape", TensorProto.INT64, [2])


def soften(e: Emitter, scores: str, sinks: Any, kv_heads: int, group: int) -> str:
    """Softmax over the keys, in which a sink takes part as one more key whose weight is then dropped."""
    if sinks is None:
        return e.op("Softmax", scores, axis=-1)
    column = reshape(e, e.tensor(sinks), kv_heads, 1, 1, group, 1)
    column = e.op("Expand", column, batched(e, (kv_heads,), (group, 1)))
    weights = e.op("Softmax", e.op("Concat", scores, column, axis=4), axis=-1)
    return e.op("Slice", weights, e.ints(0), e.ints(-1), e.ints(4))
