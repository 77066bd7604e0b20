"""`0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))) => gelu(x, "tanh")`, the same with erf, and `x·sigmoid(x) => silu(x)`."""

from __future__ import annotations

import math

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite
from llmbuild.builder.passes.edit import call, dtype
from llmbuild.builder.passes.matcher import (
    Bindings,
    Call,
    Declined,
    Number,
    OneOf,
    Value,
    add,
    mul,
    pow_,
    rewrite_all,
    value_of_dtype,
)

aten = torch.ops.aten

X = Value("x")
CUBE = OneOf((pow_(X, 3), mul(X, mul(X, X))))
INNER = OneOf(
    (
        mul(add(X, mul(CUBE, Number("cubic"))), Number("slope")),
        mul(mul(X, Number("slope")), add(mul(mul(X, Number("cubic")), X), 1)),
        mul(mul(X, Number("slope")), add(mul(mul(X, X), Number("cubic")), 1)),
    )
)
TANH = add(Call((aten.tanh.default,), (INNER,)), 1)
ERF_ARGUMENT = OneOf((Call((aten.div.Tensor,), (X, Number("divisor"))), mul(X, Number("slope"))))
ERF = add(Call((aten.erf.default,), (ERF_ARGUMENT,)), 1)
HALF = 0.5


def halved_product(factor: Call) -> OneOf:
    return OneOf((mul(mul(X, HALF), factor), mul(X, mul(factor, HALF)), mul(mul(X, factor), HALF)))


GELU_TANH = halved_product(TANH)
GELU = halved_product(ERF)
SILU = mul(X, Call((aten.sigmoid.default,), (X,)))


def activation(program: Program) -> Rewrite:
    log = Rewrite("activation", 0)
    for pattern, rewrite in ((GELU_TANH, gelu_tanh), (GELU, gelu), (SILU, silu)):
        each = rewrite_all(program, "activation", pattern, rewrite)
        log.count += each.count
        log.declined.extend(each.declined)
    return log


def gelu_tanh(program: Program, root: fx.Node, found: Bindings) -> fx.Node:
    demand("slope", found["slope"], math.sqrt(2 / math.pi))
    demand("cubic coefficient", found["cubic"], 0.044715)
    return call(root, aten.gelu.default, value_of_dtype(found["x"], dtype(root)), approximate="tanh")


def gelu(program: Program, root: fx.Node, found: Bindings) -> fx.Node:
    slope = found["slope"] if "slope" in found else 1 / found["divisor"]
    demand("slope", slope, math.sqrt(0.5))
    return call(root, aten.gelu.default, value_of_dtype(found["x"], dtype(root)))


def silu(program: Program, root: fx.Node, found: Bindings) -> fx.Node:
    return call(root, aten.silu.default, value_of_dtype(found["x"], dtype(root)))


def demand(name: str, value: float, wanted: float) -> None:
    if not math.isclose(value, wanted, rel_tol=1e-6):
        raise Declined(f"the {name} is {value}, not {wanted:.9g}")
