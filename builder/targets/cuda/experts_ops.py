"""A mixture of experts in a plan: sort, two grouped products and a sum; see `plugins/kernels/moe_plan.py`."""

from __future__ import annotations

import re
from dataclasses import replace

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cuda.lowered import Lowered, dtype_name
from llmbuild.builder.targets.cuda.partition import Barrier
from llmbuild.builder.targets.cuda.views import NoRule
from llmbuild.engine.launch_plan import Argument, KernelOp, Number
from llmbuild.plugins.kernels.moe_plan import experts_plan
from llmbuild.plugins.kernels.moe_shape import ExpertsShape

OPERANDS = ("x", "ids", "scores", "up", "down", "up_bias", "down_bias")


def experts_ops(lowered: Lowered, part: Barrier) -> None:
    """Add the launches of one layer's experts.

    Raises:
        NoRule: Weights and tokens differ in dtype.
    """
    node = part.node
    x, ids, scores, up, down, up_bias, down_bias, activation, gated, slope, limit, shift = arguments(node)
    dtypes = {each.meta["val"].dtype for each in (x, up, down, up_bias, down_bias) if each is not None}
    if len(dtypes) > 1:
        raise NoRule(node, f"experts of {' and '.join(sorted(map(dtype_name, dtypes)))}")
    experts, hidden, intermediate = (int(dim) for dim in size(down))
    shape = ExpertsShape(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=int(size(ids)[1]),
        dtype=dtype_name(dtypes.pop()),
        activation=activation,
        gated=gated,
        slope=slope,
        limit=limit,
        shift=shift,
        up_bias=up_bias is not None,
        down_bias=down_bias is not None,
        ids_dtype=dtype_name(ids.meta["val"].dtype),
        scores_dtype=dtype_name(scores.meta["val"].dtype),
    )
    plan = experts_plan(shape, lowered.hardware.sm, name="experts", pdl=lowered.hardware.pdl)
    rows = str(lowered.parts.buffers[node.name].rows)  # the last layer may compute only the rows that are wanted

    def of_rows(expression: str) -> str:
        """An expression of the plan, in which T stands for the rows."""
        return re.sub(r"\bT\b", rows, expression)

    places: dict[str, Argument] = {"tokens": Number(value=rows), "out": lowered.place(node.name)}
    for name, view in zip(OPERANDS, part.inputs, strict=False):
        places[name] = lowered.place(view.buffer)
    for name, weight in zip(OPERANDS[3:], (up, down, up_bias, down_bias), strict=True):
        if weight is not None:
            places[name] = lowered.place(weight.name)
    for name, (dtype, needed) in plan.workspaces.items():
        places[name] = lowered.workspace(f"{node.name}_{name}", dtype, of_rows(needed))
    for spec in plan.specs:
        named = plan.arguments[spec.name]
        x, y, z = map(of_rows, spec.grid)
        ordered = tuple(places[named[argument]] for argument in spec.signature)
        lowered.ops.append(
            KernelOp(kernel=lowered.kernel(replace(spec, grid=(x, y, z))), arguments=ordered, label=node.name)
        )
