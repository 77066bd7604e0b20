"""`linear_scaled(q, W, s, t) => linear_numbers(q, W) · s · tᵀ (+ bias)`: scales where a row program reads the product.

With a scale for each row of both operands the GEMM library reads few rows of 8-bit floats at half the speed that it has
without (docs/decisions/0006-fp8-products.md). What reads a product of a decoder is a row program nearly always, and
there scales cost a load. Rounding a product before it is scaled loses what rounding it after does; numbers of float16
would overflow, and stay as they are.
"""

from __future__ import annotations

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite
from llmbuild.builder.passes.edit import arguments, call, is_call, replace, size
from llmbuild.builder.targets.cuda.levels import barrier
from llmbuild.builder.targets.cuda.views import is_view

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
CASTS = (aten.to.dtype, aten._to_copy.default)


def late_scales(program: Program) -> Rewrite:
    """Rewrite the products of 8-bit floats that row programs alone read, in place."""
    log = Rewrite("late_scales", 0)
    for node in [node for node in program.graph.nodes if is_call(node, llmbuild.linear_scaled.default)]:
        x, w, x_scale, w_scale, bias, block, dtype = arguments(node)
        if block[0] != 1 or w.meta["val"].dtype != torch.float8_e4m3fn or dtype == torch.float16:
            continue
        if not read_by_row_programs(program, node):
            continue
        product = call(node, llmbuild.linear_numbers.default, x, w, dtype)
        of_columns = call(node, aten.reshape.default, w_scale, [int(size(w)[0])])
        result = call(node, aten.mul.Tensor, call(node, aten.mul.Tensor, product, x_scale), of_columns)
        if bias is not None:
            result = call(node, aten.add.Tensor, result, bias)
        replace(node, call(node, aten.to.dtype, result, dtype) if dtype != torch.float32 else result)
        log.count += 1
    return log


def read_by_row_programs(program: Program, node: fx.Node) -> bool:
    """Whether no product, no attention's queries and not the end of the graph read a value as it lies in memory."""
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.op == "output":
                return False
            if is_view(user) or is_call(user, *CASTS):
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
            elif is_call(user, llmbuild.paged_attention.default):  # row programs append keys and values
                if user.args[0] is value:
                    return False
            elif barrier(program, user) is not None:
                return False
    return True
