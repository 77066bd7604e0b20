"""The table: op → rule. A node whose op is missing here is reported with its source line."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from llmbuild.builder.passes.edit import arg, is_call
from llmbuild.builder.targets.cuda import views
from llmbuild.builder.targets.cuda.rules import assembly, cache, pointwise, quantize, reductions, router
from llmbuild.builder.targets.cuda.section import Section, Value
from llmbuild.builder.targets.cuda.views import Indices, NoRule

RULES: dict[Any, pointwise.Rule] = {
    **pointwise.RULES,
    **reductions.RULES,
    **assembly.RULES,
    **router.RULES,
    **cache.RULES,
}
PARTS: dict[Any, Callable[[Section, fx.Node, Indices, int], Value]] = {
    **reductions.PARTS,
    **quantize.PARTS,
    **router.PARTS,
    **cache.PARTS,
}


def rule(node: fx.Node) -> pointwise.Rule:
    """Return the rule of a node that is computed; that of an op with several results, for each `getitem` of it.

    Raises:
        NoRule: There is none.
    """
    if is_call(node, operator.getitem):
        producer, output = arg(node, 0), arg(node, 1)
        part = PARTS.get(producer.target)
        if part is not None:
            return lambda section, _, index: part(section, producer, index, output)
        raise NoRule(producer, "no rule for this op")
    found = RULES.get(node.target)
    if found is None:
        raise NoRule(node, "no rule for this op")
    return found


def has_rule(node: fx.Node) -> bool:
    """Whether a call can be written, its form aside."""
    known = node.target in RULES or node.target in PARTS or node.target in views.PARTS
    return known or node.target is operator.getitem or views.is_view(node)
