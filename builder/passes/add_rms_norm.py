"""`s = x + r; n = rms_norm(s) => n, s = add_rms_norm(x, r)`."""

from __future__ import annotations

import operator

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.passes.edit import arg, arguments, call, describe, dtype, is_call, is_tensor, replace, size

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild


def add_rms_norm(program: Program) -> Rewrite:
    log = Rewrite("add_rms_norm", 0)
    for norm in list(program.graph.nodes):
        if not is_call(norm, llmbuild.rms_norm.default) or not is_call(arg(norm, 0), aten.add.Tensor):
            continue
        total = arg(norm, 0)
        reason = why_not(total)
        if reason is not None:
            log.declined.append(f"{norm.name}: {reason} [{source_line(norm)}]")
            continue
        weight, eps, rounded = arguments(norm)[1:]
        # At the sum, whose other users may come before the norm; weights are placeholders, so they are there already.
        fused = call(total, llmbuild.add_rms_norm.default, *total.args[:2], weight, eps, rounded)
        normalised, summed = (call(total, operator.getitem, fused, index) for index in (0, 1))
        replace(total, summed)
        replace(norm, normalised)  # which erases `summed`, if only the norm read it
        log.count += 1
    return log


def why_not(total: fx.Node) -> str | None:
    x, residual, alpha = arguments(total)
    if alpha != 1:
        return f"the sum scales its second term by {alpha}"
    if not is_tensor(x) or not is_tensor(residual):
        return f"the sum adds {describe(residual)} to {describe(x)}, not a residual"
    if size(x) != size(residual) or dtype(x) != dtype(residual):
        return f"the terms differ: {describe(x)}, {describe(residual)}"
    return None
