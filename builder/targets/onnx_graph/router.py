"""What routers of mixtures of experts need: the best of a row, and picking or marking by index along it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, axis, dtype, rank
from llmbuild.builder.targets.onnx_graph.emitter import Emitter, numpy_dtype
from llmbuild.builder.targets.onnx_graph.rule import Rule, operand

aten = torch.ops.aten


def topk(e: Emitter, node: fx.Node) -> tuple[str, ...]:
    """Equal values: onnxruntime takes the lower index, as torch does in practice. `sorted` costs nothing here."""
    x, k, dim, largest, _ = arguments(node)
    where = axis(dim, rank(x))
    return e.ops("TopK", e.tensor(x), e.ints(k), outputs=2, axis=where, largest=int(largest), sorted=1)


def max_with_index(e: Emitter, node: fx.Node) -> tuple[str, str]:
    x, dim, keep = arguments(node)
    where = axis(dim, rank(x))
    name = e.tensor(x)
    index = e.op("ArgMax", name, axis=where, keepdims=int(keep), select_last_index=0)
    return e.op("ReduceMax", name, e.ints(where), keepdims=int(keep)), index


def gather(e: Emitter, node: fx.Node) -> str:
    x, dim, index = arguments(node)[:3]
    return e.op("GatherElements", e.tensor(x), e.tensor(index), axis=axis(dim, rank(x)))


def scatter(e: Emitter, node: fx.Node) -> str:
    """x with the elements at `index` along an axis replaced by a number, or by a tensor of the index's shape."""
    x, dim, index, source = arguments(node)[:4]
    if not isinstance(source, fx.Node):
        source_name = e.op("Expand", operand(e, source, dtype(node)), e.op("Shape", e.tensor(index)))
    else:
        source_name = operand(e, source, dtype(node))
    return e.op("ScatterElements", e.tensor(x), e.tensor(index), source_name, axis=axis(dim, rank(x)))


def masked_fill(e: Emitter, node: fx.Node) -> str:
    x, mask, value = arguments(node)
    return e.op("Where", e.tensor(mask), operand(e, value, dtype(node)), operand(e, x, dtype(node)))


def filled_like(e: Emitter, node: fx.Node) -> str:
    """zeros_like, ones_like and full_like. Multiplying with 0 would keep NaN, so the shape is read instead."""
    if node.target is aten.full_like.default:
        value = arguments(node)[1]
    else:
        value = int(node.target is aten.ones_like.default)
    fill = np.full(1, value, numpy_dtype(dtype(node)))
    return e.op("ConstantOfShape", e.op("Shape", e.tensor(node.args[0])), value=e.attribute_tensor(fill))


def boolean(node: fx.Node) -> str | None:
    return None if dtype(node) is torch.bool else f"it inverts the bits of {dtype(node)}"


def logical_not(e: Emitter, node: fx.Node) -> str:
    return e.op("Not", e.tensor(node.args[0]))


RULES: dict[Any, Rule] = {
    aten.topk.default: Rule(topk),
    aten.max.dim: Rule(max_with_index),
    aten.gather.default: Rule(gather),
    aten.scatter.value: Rule(scatter),
    aten.scatter.src: Rule(scatter),
    aten.masked_fill.Scalar: Rule(masked_fill),
    aten.zeros_like.default: Rule(filled_like),
    aten.ones_like.default: Rule(filled_like),
    aten.full_like.default: Rule(filled_like),
    aten.bitwise_not.default: Rule(logical_not, boolean),
}
