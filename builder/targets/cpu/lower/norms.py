"""Norms: onnxruntime's own fused operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, rank, size
from llmbuild.builder.targets.onnx_graph.emitter import CONTRIB, Emitter
from llmbuild.builder.targets.onnx_graph.rule import Rule

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild


def weight(e: Emitter, node: Any, width: int) -> str:
    """Return the norm's weight, or ones: onnxruntime's norms always have one."""
    return e.constant(np.ones(width, np.float32)) if node is None else e.tensor(node)


def rms_norm(e: Emitter, node: fx.Node) -> str:
    x, scale, epsilon, _ = arguments(node)
    scale = weight(e, scale, size(x)[-1])
    return e.op("SimplifiedLayerNormalization", e.tensor(x), scale, axis=-1, epsilon=epsilon, stash_type=1)


def add_rms_norm(e: Emitter, node: fx.Node) -> tuple[str, str]:
    x, residual, scale, epsilon, _ = arguments(node)
    scale = weight(e, scale, size(x)[-1])
    # Outputs: normalised, mean, inverse deviation, sum. The operator takes [T, C] and [1, T, C] only.
    outputs = e.ops(
        "SkipSimplifiedLayerNormalization",
        e.tensor(x),
        e.tensor(residual),
        scale,
        outputs=(True, False, False, True),
        domain=CONTRIB,
        epsilon=epsilon,
    )
    return outputs[0], outputs[3]


def rows(node: fx.Node) -> str | None:
    return None if rank(node.args[0]) in (2, 3) else f"rank {rank(node.args[0])}"  # type: ignore[arg-type]


def layer_norm(e: Emitter, node: fx.Node) -> str:
    x, shape, scale, bias, epsilon = arguments(node)[:5]
    names = [e.tensor(x), weight(e, scale, shape[-1])]
    if bias is not None:
        names.append(e.tensor(bias))
    return e.op("LayerNormalization", *names, axis=-1, epsilon=epsilon)


def last_axis(node: fx.Node) -> str | None:
    shape: Any = node.args[1]
    return None if len(shape) == 1 else f"it normalises over {len(shape)} axes"


RULES: dict[Any, Rule] = {
    llmbuild.rms_norm.default: Rule(rms_norm),
    llmbuild.add_rms_norm.default: Rule(add_rms_norm, rows),
    aten.layer_norm.default: Rule(layer_norm, last_axis),
}
