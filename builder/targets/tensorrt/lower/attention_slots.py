"""Attention of tensorrt-rtx: every sequence owns a slot of the cache, and a run is a padded batch [B, T] of tokens.

Inputs of the graph beside tokens and positions, for layers l and windows w:

    write_indices [B] int64          where in its slot each sequence's first token goes
    key_positions [S] int32          0 .. S - 1: how far into the slots the run looks, at least to its longest sequence
    keys.l [B, Hkv, Smax, D]         the slots of B neighbouring sequences, written in place (keys.l.out)

The mask is computed from positions, never left to the parser: a query at position p sees keys at 0 .. p, in a window
p - W + 1 .. p. What a padded row writes lies past its sequence's end, where nobody looks before it is overwritten.
Attention with a plain softmax becomes the Attention operator; scores that are capped, shifted by ALiBi or shared with a
sink are computed in float32 by operators of their own, as the oracle does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype, size
from llmbuild.builder.targets.onnx_graph.emitter import ONNX_TYPES, Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule, cast, reshape

BATCH, TOKENS = "B", "T"


def attention(e: Emitter, node: fx.Node) -> str:
    q, k, v, layer, scale, window, softcap, sinks, slopes, *_ = arguments(node)
    q_heads, width, value_width = int(size(q)[1]), int(size(q)[2]), int(size(v)[2])
    queries = by_head(e, e.tensor(q), q_heads, width)
    keys, values = (cached(e, f"{name}.{layer}", new) for name, new in (("keys", k), ("values", v)))
    mask = visible(e, window)
    if softcap is None and sinks is None and slopes is None and width == value_width:
        out = e.op("Attention", queries, keys, values, mask, scale=float(scale))
    else:
        kind = dtype(q), q_heads, int(size(k)[1]), width, value_width
        out = written_out(e, (queries, keys, values), mask, kind, scale, softcap, sinks, slopes)
    return reshape(e, e.op("Transpose", out, perm=[0, 2, 1, 3]), -1, q_heads, value_width)


def by_head(e: Emitter, x: str, heads: int, width: int) -> str:
    """[B·T, H, D] -> [B, H, T, D]"""
    shape = e.shared(("by_token", heads, width), lambda: e.op("Concat", run_shape(e), e.ints(heads, width), axis=0))
    return e.op("Transpose", e.op("Reshape", x, shape), perm=[0, 2, 1, 3])


def run_shape(e: Emitter) -> str:
    """(B, T)"""
    return e.shared(("run_shape",), lambda: e.op("Shape", "input_ids"))


def dims(e: Emitter, *parts: int | str) -> str:
    """A shape made of numbers and of the run's B, T and S; made once."""

    def part(which: int | str) -> str:
        if which == "S":
            return e.shared(("num_keys",), lambda: e.op("Shape", "key_positions"))
        if isinstance(which, str):
            at = (BATCH, TOKENS).index(which)
            return e.shared((which,), lambda: e.op("Slice", run_shape(e), e.ints(at), e.ints(at + 1)))
        return e.ints(which)

    names = [part(which) for which in parts]
    return e.shared(("dims", *parts), lambda: e.op("Concat", *names, axis=0))


def cached(e: Emitter, name: str, new: fx.Node) -> str:
    """Write `new` [B·T, H, D] into the slots `name` and return their first S tokens, [B, H, S, D]."""
    heads, width = int(size(new)[1]), int(size(new)[2])
    kind = ONNX_TYPES[dtype(new)]
    whole: list[int | str] = [BATCH, heads, e.limits.block_size, width]
    slots = e.add_input(name, kind, whole)
    at = e.add_input("write_indices", TensorProto.INT64, [BATCH])
    written = e.op("TensorScatter", slots, by_head(e, e.tensor(new), heads, width), at, axis=2, mode="linear")
    e.rename(written, f"{name}.out")
    e.add_output(f"{name}.out", kind, whole)
    return e.op("Slice", f"{name}.out", e.ints(0), dims(e, "S"), e.ints(2))


def visible(e: Emitter, window: int | None) -> str:
    """bool [B, 1, T, S]: whether the query may see the key."""

    def mask() -> str:
        keys = e.shared(("keys_row",), lambda: reshape(e, "key_positions", 1, 1, 1, -1))
        queries = e.shared(("queries_column",), lambda: query_column(e))
        seen = e.shared(("causal",), lambda: e.op("LessOrEqual", keys, queries))
        if window is None:
            return seen
        last_hidden = e.op("Sub", queries, e.constant(window, np.int32))
        return e.op("And", seen, e.op("Greater", keys, last_hidden))

    e.add_input("key_positions", TensorProto.INT32, ["S"])
    return e.shared(("mask", window or 0), mask)


def query_column(e: Emitter) -> str:
    """position_ids as int32 [B, 1, T, 1]."""
    return e.op("Unsqueeze", "position_ids", e.ints(1, 3))


def written_out(
    e: Emitter,
    tensors: tuple[str, str, str],
    mask: str,
    kind: tuple[torch.dtype, int, int, int, int],
    scale: float,
    softcap: float | None,
    sinks: Any,
    slopes: Any,
) -> str:
    """Attention in single operators: [B, Hq, T, D] over [B, Hkv, S, D] and [B, Hkv, S, Dv] -> [B, Hq, T, Dv]."""
    queries, keys, values = tensors
    have, q_heads, kv_heads, width, value_width = kind
    rows = e.op("Reshape", queries, dims(e, BATCH, kv_heads, -1, width))  # heads of one kv head below each other
    scores = e.op("MatMul", rows, e.op("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = cast(e, e.op("Reshape", scores, dims(e, BATCH, q_heads, TOKENS, "S")), have, torch.float32)
    scores = e.op("Mul", scores, e.constant(scale, np.float32))
    if softcap is not None:
        cap = e.constant(softcap, np.float32)
        scores = e.op("Mul", e.op("Tanh", e.op("Div", scores, cap)), cap)
    if slopes is not None:
        steep = cast(e, reshape(e, e.tensor(slopes), 1, q_heads, 1, 1), dtype(slopes), torch.float32)
        scores = e.op("Add", scores, e.op("Mul", steep, e.shared(("distance",), lambda: distance(e))))
    scores = e.op("Where", mask, scores, e.constant(-np.inf, np.float32))
    weights = cast(e, soften(e, scores, sinks, q_heads), torch.float32, have)
    weights = e.op("Reshape", weights, dims(e, BATCH, kv_heads, -1, "S"))
    out = e.op("MatMul", weights, values)
    return e.op("Reshape", out, dims(e, BATCH, q_heads, TOKENS, value_width))


def distance(e: Emitter) -> str:
    """Key position - query position, float32 [B, 1, T, S]."""
    keys = e.shared(("keys_row",), lambda: reshape(e, "key_positions", 1, 1, 1, -1))
    queries = e.shared(("queries_column",), lambda: query_column(e))
    return e.op("Cast", e.op("Sub", keys, queries), to=TensorProto.FLOAT)


def soften(e: Emitter, scores: str, sinks: Any, heads: int) -> str:
    """Softmax over the keys, in which a sink takes part as one more key whose weight is then dropped."""
    if sinks is None:
        return e.op("Softmax", scores, axis=-1)
    column = cast(e, reshape(e, e.tensor(sinks), 1, heads, 1, 1), dtype(sinks), torch.float32)
    column = e.op("Expand", column, dims(e, BATCH, heads, TOKENS, 1))
    weights = e.op("Softmax", e.op("Concat", scores, column, axis=-1), axis=-1)
    return e.op("Slice", weights, e.ints(0), e.ints(-1), e.ints(3))


def no_scales(node: fx.Node) -> str | None:
    """An 8-bit cache has scales."""
    k_scale = arguments(node)[9] if len(arguments(node)) > 9 else None
    return None if k_scale is None else "a KV cache in 8 bits (slots are kept in the computation dtype)"


RULE = Rule(attention, no_scales)
