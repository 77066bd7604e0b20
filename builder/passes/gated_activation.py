"""`activation(gate) * up => gated_activation(gate, up)` for silu, gelu (exact and tanh), relu, relu² and sigmoid."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite
from llmbuild.builder.passes.edit import call, describe, dtype, size
from llmbuild.builder.passes.matcher import (
    Bindings,
    Call,
    Declined,
    OneOf,
    Value,
    mul,
    pow_,
    rewrite_all,
    value_of_dtype,
)

aten = torch.ops.aten

GATE = Value("gate")
RELU = Call((aten.relu.default,), (GATE,))
ACTIVATION: dict[str, Any] = {
    "silu": Call((aten.silu.default,), (GATE,)),
    "gelu": Call((aten.gelu.default,), (GATE, "none")),
    "gelu_tanh": Call((aten.gelu.default,), (GATE, "tanh")),
    "relu": RELU,
    "relu2": OneOf((pow_(RELU, 2), mul(RELU, RELU), Call((aten.square.default,), (RELU,)))),
    "sigmoid": Call((aten.sigmoid.default,), (GATE,)),
}


def gated_activation(program: Program) -> Rewrite:
    log = Rewrite("gated_activation", 0)
    for name, pattern in ACTIVATION.items():

        def rewrite(program: Program, root: fx.Node, found: Bindings, name: str = name) -> fx.Node:
            return build(root, found, name)

        each = rewrite_all(program, log.name, mul(pattern, Value("up")), rewrite)
        log.count += each.count
        log.declined.extend(each.declined)
    return log


def build(root: fx.Node, found: Bindings, name: str) -> fx.Node:
    gate, up = (value_of_dtype(found[key], dtype(root)) for key in ("gate", "up"))
    if size(gate) != size(up):
        raise Declined(f"gate and up differ in shape: {describe(gate)}, {describe(up)}")
    return call(root, torch.ops.llmbuild.gated_activation.default, gate, up, name)
