"""The table: op → rule. A node whose op is missing here, or whose rule declines it, is reported with its reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.targets.cpu.lower import (
    attention_dense,
    attention_paged,
    embedding,
    experts,
    integers,
    linear,
    norms,
)
from llmbuild.builder.targets.onnx_graph import assembly, pointwise, rope, router, shapes
from llmbuild.builder.targets.onnx_graph.rule import Rule, unknown_dtype

COMMON: dict[Any, Rule] = {
    **shapes.RULES,
    **assembly.RULES,
    **pointwise.RULES,
    **norms.RULES,
    **linear.RULES,
    **integers.RULES,
    **embedding.RULES,
    **rope.RULES,
    **router.RULES,
    **experts.RULES,
}
TYPES = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool})
ATTENTION = torch.ops.llmbuild.paged_attention.default


def rules(*, native: bool, paged: bool) -> dict[Any, Rule]:
    """The table for engines with native operators or without; `paged`: attention is one of those."""
    attention = attention_paged.attention if paged else attention_dense.attention
    return {**COMMON, ATTENTION: Rule(attention), **(attention_paged.NATIVE_RULES if native else {})}


def why_not(node: fx.Node, table: dict[Any, Rule]) -> str | None:
    """Return None when `table` can lower `node`, else why not."""
    rule = table.get(node.target)
    if rule is None:
        return "no rule for this op"
    unknown = unknown_dtype(node, TYPES)
    if unknown is not None:
        return f"dtype {unknown} has no kernels in onnxruntime on the CPU"
    return rule.check(node)
