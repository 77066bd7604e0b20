"""The table: op → rule. A node whose op is missing here, or whose rule declines it, is reported with its reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.targets.onnx_graph import assembly, pointwise, rope, router, shapes
from llmbuild.builder.targets.onnx_graph.rule import Rule, is_size, unknown_dtype
from llmbuild.builder.targets.tensorrt.lower import (
    attention_paged,
    attention_slots,
    experts,
    linear,
    norms,
    scaled,
)

COMMON: dict[Any, Rule] = {
    **shapes.RULES,
    **assembly.RULES,
    **pointwise.RULES,
    **norms.RULES,
    **linear.RULES,
    **rope.RULES,
    **router.RULES,
    **experts.RULES,
    **scaled.RULES,
}
# What networks compute in. float64, for one, does not exist there.
TYPES = frozenset(
    {
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.bool,
    }
)
ATTENTION = torch.ops.llmbuild.paged_attention.default


def rules(*, paged: bool) -> dict[Any, Rule]:
    """The table of `tensorrt`, whose attention is a plugin over pages, or of `tensorrt-rtx`, which has slots."""
    return {**COMMON, ATTENTION: attention_paged.RULE if paged else attention_slots.RULE}


def why_not(node: fx.Node, table: dict[Any, Rule]) -> str | None:
    """Return None when `table` can lower `node`, or nothing has to be lowered there, else why not."""
    if node.op != "call_function" or is_size(node):
        return None
    rule = table.get(node.target)
    if rule is None:
        return "no rule for this op"
    unknown = unknown_dtype(node, TYPES)
    return f"networks have no {unknown}" if unknown is not None else rule.check(node)


def unsupported(graph: fx.Graph, table: dict[Any, Rule]) -> list[tuple[fx.Node, str]]:
    """Return every node that cannot be lowered, with the reason."""
    reasons = ((node, why_not(node, table)) for node in graph.nodes)
    return [(node, reason) for node, reason in reasons if reason is not None]
