"""`linear(f(h), W) => linear(f'(h), W·diag(s))` with f' = diag(s)⁻¹·f, for all linears that read one value.

AWQ and SmoothQuant choose s (`quantization.scaled`).

Exact, and no node is added: s⁻¹ goes into the weight, and the bias, of a norm; or, where the value is a gate times
`linear(h, U)`, into the rows of U. Where neither is so, the value is left as it is, with a reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, source_line
from llmbuild.builder.passes.edit import arg, arguments, describe, is_call
from llmbuild.builder.passes.linear_inputs import Known, LinearInput
from llmbuild.quantization.awq import AwqSearch
from llmbuild.quantization.recipes import Awq, Scheme, SmoothQuant
from llmbuild.quantization.scaled import Scaled, ScaleSearch
from llmbuild.quantization.smooth import SmoothSearch

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
SEARCHES: dict[type, Callable[..., ScaleSearch]] = {Awq: AwqSearch, SmoothQuant: SmoothSearch}


@dataclass
class ScaledInputs:
    """searches: of the inputs that are scaled, by key. declined: why others are left as they are, one line each."""

    searches: dict[str, ScaleSearch] = field(default_factory=dict)
    declined: list[str] = field(default_factory=list)


def scale_inputs(
    program: Program,
    inputs: list[LinearInput],
    schemes: Mapping[fx.Node, Scheme],
    known: Mapping[fx.Node, Known],
) -> ScaledInputs:
    """Scale what linears of an `Awq` or `SmoothQuant` scheme read.

    Args:
        schemes: Of all weights.
        known: Statistics by weight.
    """
    found = ScaledInputs()
    for each in inputs:
        weights = [arg(node, 1) for node in each.linears]
        chosen = {schemes[weight] for weight in weights}
        scheme: Any = next((one for one in chosen if type(one) in SEARCHES), None)
        if scheme is None:
            continue
        makers = makers_of(program, each, weights)
        if len(chosen) > 1:
            makers = f"its linears follow different recipes: {', '.join(sorted(map(str, chosen)))}"
        if isinstance(makers, str):
            found.declined.append(f"{each.x.name}: not scaled, {makers} [{source_line(each.linears[0])}]")
            continue
        sources = tuple(program.weights[weight.name] for weight in weights)
        scales = SEARCHES[type(scheme)](sources, scheme, *known[weights[0]])
        found.searches[each.key] = scales
        for weight in weights:
            program.weights[weight.name] = Scaled(program.weights[weight.name], scales, columns=True)
        for maker in makers:
            program.weights[maker.name] = Scaled(program.weights[maker.name], scales, columns=False)
    return found


def makers_of(program: Program, each: LinearInput, weights: list[fx.Node]) -> list[fx.Node] | str:
    """Return the weights whose rows, divided, divide the channels of the value; or why there are none."""
    others = [user for user in each.x.users if user not in each.linears]
    if others:
        return f"it is also read by {describe(others[0])}"
    shared = next((weight for weight in weights if len(weight.users) > 1), None)
    if shared is not None:
        return f"{shared.name} is used elsewhere too"
    node, alone = each.x, True
    if node.target is operator.getitem and is_call(arg(node, 0), llmbuild.add_rms_norm.default) and arg(node, 1) == 0:
        node = arg(node, 0)
    if is_call(node, llmbuild.rms_norm.default):
        found = [arguments(node)[1]]
    elif is_call(node, llmbuild.add_rms_norm.default):
        found = [arguments(node)[2]]
    elif is_call(node, aten.layer_norm.default):
        weight, bias = arguments(node)[2:4]
        found = [weight] if bias is None else [weight, bias]
    elif is_call(node, llmbuild.gated_activation.default):
        up = arg(node, 1)
        if not is_call(up, aten.linear.default):
            return f"it is a gate times {describe(up)}, which is no linear"
        alone = len(up.users) == 1
        weight, bias = arguments(up)[1:3]
        found = [weight] if bias is None else [weight, bias]
    else:
        return f"it is made by {describe(node)}, no norm and no gate times a linear"
    for maker in found:
        if maker is None:
            return f"{describe(node)} has no weight"
        expr = program.weight_of(maker)
        if expr is None or expr.block_format is not None or expr.shape[0] != each.columns:
            return f"{describe(maker)} is no plain weight of {each.columns} rows"
        if len(maker.users) > 1 or not alone:
            return f"{describe(maker)} serves other values too"
    return found
