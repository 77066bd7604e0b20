"""RoPE through ONNX's RotaryEmbedding: [T, H, D] becomes [1, T, H·D] and back, which moves no data."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, dtype, rank, size
from llmbuild.builder.targets.onnx_graph.emitter import Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule, cast, onnx_shape, reshape


def rope(e: Emitter, node: fx.Node) -> str:
    x, cos, sin, interleaved = arguments(node)
    heads, width = (int(dim) for dim in size(x)[-2:])
    half = int(size(cos)[-1])
    # The operator has one type for all; torch computes in the wider of the two.
    wide = torch.promote_types(dtype(x), dtype(cos))
    tables = [
        e.shared(("rope_table", e.tensor(table), wide), lambda t=table: token_table(e, t, half, wide))
        for table in (cos, sin)
    ]
    turned = e.op(
        "RotaryEmbedding",
        reshape(e, cast(e, e.tensor(x), dtype(x), wide), 1, -1, heads * width),
        *tables,
        num_heads=heads,
        rotary_embedding_dim=0 if 2 * half == width else 2 * half,
        interleaved=int(interleaved),
    )
    dims = onnx_shape(size(node))
    assert dims is not None
    return cast(e, reshape(e, turned, *dims), wide, dtype(node))


def token_table(e: Emitter, table: fx.Node, half: int, wide: torch.dtype) -> str:
    return reshape(e, cast(e, e.tensor(table), dtype(table), wide), 1, -1, half)


def one_sequence(node: fx.Node) -> str | None:
    x, cos = node.args[:2]
    flat = all(isinstance(dim, int) for dim in size(x)[-2:])  # type: ignore[arg-type]
    if not flat or rank(x) > 4 or any(dim != 1 for dim in size(x)[:-3]) or any(dim != 1 for dim in size(cos)[:-2]):  # type: ignore[arg-type]
        return f"x {size(x)}, cos {size(cos)}: only [T, H, D] and [T, R/2] are known"  # type: ignore[arg-type]
    return None


RULES: dict[Any, Rule] = {torch.ops.llmbuild.rope.default: Rule(rope, one_sequence)}
