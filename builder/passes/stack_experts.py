"""`moe_experts(.., expert_rows(w), ..) => moe_experts(.., w', ..)` with w' a stack of one weight an expert.

However a checkpoint holds experts (one tensor each, all in one, transposed, gate and up interleaved), they become a
`Stack` whose parts are [N, K] matrices that load, cast, reorder and quantize one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmbuild.builder.ir import Map, Program, Rewrite, Stack, WeightExpr, items, source_line
from llmbuild.builder.passes.edit import arg, describe, erase_unused, is_call
from llmbuild.builder.passes.fold_weights import new_weight

llmbuild = torch.ops.llmbuild
UP, DOWN = 3, 4  # places of the weights among the arguments of moe_experts


@dataclass(frozen=True)
class ExpertRows:
    """The function of one expert's weight: `llmbuild::expert_rows`. Equal layouts compare equal."""

    transposed: bool
    interleaved: bool

    def __call__(self, weight: Tensor) -> Tensor:
        result = llmbuild.expert_rows(weight, self.transposed, self.interleaved)
        assert isinstance(result, Tensor)
        return result


def stack_experts(program: Program) -> Rewrite:
    log = Rewrite("stack_experts", 0)
    for node in [node for node in program.graph.nodes if is_call(node, llmbuild.moe_experts.default)]:
        for place in (UP, DOWN):
            reason = stack(program, node, place)
            if reason is None:
                log.count += 1
            else:
                log.declined.append(f"{node.name}: {reason} [{source_line(node)}]")
    program.drop_unused_weights()
    return log


def stack(program: Program, node: fx.Node, place: int) -> str | None:
    """Give one weight of `node` as a stack; return why not, or None."""
    given: Any = arg(node, place)
    rows = is_call(given, llmbuild.expert_rows.default)
    weight = arg(given, 0) if rows else given
    expr = program.weight_of(weight)
    if expr is None:
        return f"{describe(given)} is not a weight"
    if not rows and isinstance(expr, Stack):
        return None
    parts = items(expr)
    if rows:
        layout = ExpertRows(*given.args[1:])
        shape = tuple(int(dim) for dim in given.meta["val"].shape[1:])
        parts = tuple(reordered(part, layout, shape) for part in parts)
    stacked = new_weight(program, f"{weight.name}_experts", Stack(parts))
    node.update_arg(place, stacked)
    erase_unused(given)
    return None


def reordered(part: WeightExpr, layout: ExpertRows, shape: tuple[int, ...]) -> WeightExpr:
    names = " and ".join(name for name in ("transposed", "interleaved") if getattr(layout, name))
    return Map(part, layout, shape, part.dtype, f"{names} rows of an expert")
