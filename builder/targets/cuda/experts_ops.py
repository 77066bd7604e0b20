"""A mixture of experts in a plan: sort, two grouped products and a sum; see `plugins/kernels/moe_plan.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cuda.block_weight import BlockWeight
from llmbuild.builder.targets.cuda.lowered import Lowered, dtype_name
from llmbuild.builder.targets.cuda.partition import Barrier
from llmbuild.builder.targets.cuda.views import NoRule
from llmbuild.engine.launch_plan import Argument, KernelOp, Number
from llmbuild.plugins.kernels.moe_plan import experts_plan
from llmbuild.plugins.kernels.moe_shape import ExpertsPlan, ExpertsShape

COMPUTED = ("x", "ids", "scores")


def experts_ops(lowered: Lowered, part: Barrier) -> None:
    """Add the launches of one layer's experts.

    Raises:
        NoRule: Weights and tokens differ in dtype.
    """
    node = part.node
    x, ids, scores, up, down, up_bias, down_bias, *rest = arguments(node)
    weights = {"up": up, "down": down, "up_bias": up_bias, "down_bias": down_bias}
    one_dtype(node, x, *weights.values())
    experts, hidden, intermediate = (int(dim) for dim in size(down))
    shape = experts_shape(ids, scores, node, (experts, hidden, intermediate), rest, weights)
    plan = experts_plan(shape, lowered.hardware.sm, name="experts", pdl=lowered.hardware.pdl)
    places = {name: lowered.place(weight.name) for name, weight in weights.items() if weight is not None}
    add_launches(lowered, part, plan, places)


def block_experts_ops(lowered: Lowered, part: Barrier) -> None:
    """Add the launches of experts whose weights are held in blocks.

    Raises:
        NoRule: There are no kernels for such blocks, or biases and tokens differ in dtype.
    """
    node = part.node
    x, ids, scores, *weights, up_bias, down_bias, activation, gated, slope, limit, shift = arguments(node)
    biases = {"up_bias": up_bias, "down_bias": down_bias}
    one_dtype(node, x, *biases.values())
    places: dict[str, Argument] = {name: lowered.place(bias.name) for name, bias in biases.items() if bias is not None}
    held, columns, experts = [], [], 0
    for name, (q, scale, offset, form) in (("up", weights[:4]), ("down", weights[4:])):
        experts, *blocks = form
        weight = BlockWeight(lowered, node, q, scale, offset, tuple(blocks))
        places |= {name: weight.values, f"{name}_scale": lowered.place(scale.name)}
        if offset is not None:
            places[f"{name}_offset"] = lowered.place(offset.name)
        held.append(weight.shape)
        columns.append(int(size(q)[1]))
    hidden, intermediate = columns
    rest = (activation, gated, slope, limit, shift)
    shape = experts_shape(ids, scores, node, (experts, hidden, intermediate), rest, biases)
    try:
        plan = experts_plan(
            shape, lowered.hardware.sm, name="block_experts", blocks=(held[0], held[1]), pdl=lowered.hardware.pdl
        )
    except ValueError as error:
        raise NoRule(node, str(error)) from None
    add_launches(lowered, part, plan, places)


def one_dtype(node: fx.Node, *tensors: fx.Node | None) -> None:
    dtypes = {each.meta["val"].dtype for each in tensors if each is not None}
    if len(dtypes) > 1:
        raise NoRule(node, f"experts of {' and '.join(sorted(map(dtype_name, dtypes)))}")


def experts_shape(
    ids: fx.Node,
    scores: fx.Node,
    node: fx.Node,
    sizes: tuple[int, int, int],
    rest: Any,
    weights: Mapping[str, fx.Node | None],
) -> ExpertsShape:
    """sizes: experts, hidden, intermediate. rest: activation, gated, slope, limit and shift."""
    experts, hidden, intermediate = sizes
    activation, gated, slope, limit, shift = rest
    dtype: torch.dtype = node.meta["val"].dtype
    return ExpertsShape(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=int(size(ids)[1]),
        dtype=dtype_name(dtype),
        activation=activation,
        gated=gated,
        slope=slope,
        limit=limit,
        shift=shift,
        up_bias=weights["up_bias"] is not None,
        down_bias=weights["down_bias"] is not None,
        ids_dtype=dtype_name(ids.meta["val"].dtype),
        scores_dtype=dtype_name(scores.meta["val"].dtype),
    )


def add_launches(lowered: Lowered, part: Barrier, plan: ExpertsPlan, weights: Mapping[str, Argument]) -> None:
    node = part.node
    rows = str(lowered.parts.buffers[node.name].rows)  # the last layer may compute only the rows that are wanted

    def of_rows(expression: str) -> str:
        """An expression of the plan, in which T stands for the rows."""
        return re.sub(r"\bT\b", rows, expression)

    places: dict[str, Argument] = {"tokens": Number(value=rows), "out": lowered.place(node.name), **weights}
    for name, view in zip(COMPUTED, part.inputs, strict=True):
        places[name] = lowered.place(view.buffer)
    for name, (dtype, needed) in plan.workspaces.items():
        places[name] = lowered.workspace(f"{node.name}_{name}", dtype, of_rows(needed))
    for spec in plan.specs:
        named = plan.arguments[spec.name]
        x, y, z = map(of_rows, spec.grid)
        ordered = tuple(places[named[argument]] for argument in spec.signature)
        kernel = lowered.kernel(replace(spec, grid=(x, y, z)))
        lowered.ops.append(KernelOp(kernel=kernel, arguments=ordered, label=node.name))
