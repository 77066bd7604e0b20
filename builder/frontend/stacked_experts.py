"""transformers' conversion of per-expert tensors into one stacked tensor, read as an expression instead of run.

    experts.0.gate_proj [I, H], experts.0.up_proj [I, H], experts.1.gate_proj, ...  =>  gate_up_proj [E, 2I, H]

Run as transformers does it, a layer of 128 experts is held two or three times while it is stacked.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from llmbuild.builder.ir import Concat, Stack, WeightExpr
from llmbuild.errors import ModelError


def stacked_experts(
    converter: WeightConverter, parts: Sequence[tuple[str, str, WeightExpr]], target: str
) -> Stack | None:
    """Return what `converter` makes of `parts`, or None when it does more than stack and concatenate rows.

    Args:
        converter: The conversion, whose source patterns say the order of concatenation.
        parts: (source pattern, checkpoint name, tensor); those of one pattern in the order of the experts.
        target: Name of the model's weight, for the error.

    Raises:
        ModelError: the patterns match different numbers of tensors, or tensors that do not fit together.
    """
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    if kinds not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return None
    columns: list[list[WeightExpr]] = [
        [expr for given, _, expr in parts if given == pattern] for pattern in converter.source_patterns
    ]
    counts = {len(column) for column in columns}
    if len(counts) > 1:
        listed = ", ".join(
            f"{len(column)} of {pattern}" for column, pattern in zip(columns, converter.source_patterns, strict=True)
        )
        raise ModelError(f"{target} is incomplete: the checkpoint holds {listed}")
    experts = list(zip(*columns, strict=True))
    shapes = {tuple(part.shape for part in expert) for expert in experts}
    inner = {shape[1:] for expert in shapes for shape in expert}
    if len(shapes) != 1 or len(inner) != 1:
        raise ModelError(f"the experts of {target} have different shapes: {sorted(shapes)}")
    return Stack(tuple(expert[0] if len(expert) == 1 else Concat(expert) for expert in experts))
