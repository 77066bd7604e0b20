"""`rms_norm(x - mean(x), w, eps) => layer_norm(x, w, eps)`: LayerNorm written out by hand, without a bias."""

from __future__ import annotations

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite
from llmbuild.builder.passes.edit import arg, call, dtype, size
from llmbuild.builder.passes.matcher import (
    Anything,
    Bindings,
    Call,
    Number,
    Value,
    mean_last,
    rewrite_all,
    sub,
    value_of_dtype,
)

aten = torch.ops.aten

NORM = torch.ops.llmbuild.rms_norm.default
CENTRED = sub(Value("x"), mean_last(Value("x")))


def layer_norm(program: Program) -> Rewrite:
    pattern = Call((NORM,), (CENTRED, Anything(), Number("eps"), Anything()))
    return rewrite_all(program, "layer_norm", pattern, rewrite)


def rewrite(program: Program, root: fx.Node, found: Bindings) -> fx.Node:
    x = value_of_dtype(found["x"], dtype(root))
    norm = root if root.target is NORM else arg(root, 0)
    assert isinstance(norm, fx.Node)
    return call(root, aten.layer_norm.default, x, [size(x)[-1]], arg(norm, 1), None, float(found["eps"]))
