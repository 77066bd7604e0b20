"""Products with a weight in a plan: rows below each other in memory, whatever axes the graph gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cuda.buffers import Buffer, View
from llmbuild.builder.targets.cuda.lowered import Lowered, dtype_name
from llmbuild.builder.targets.cuda.partition import Barrier
from llmbuild.builder.targets.cuda.views import NoRule
from llmbuild.engine.launch_plan import Argument, GemmOp, KernelOp, Number, SmallGemm
from llmbuild.plugins.kernels.gemm_shape import VECTOR_BYTES, GemmShape, SmallKernel
from llmbuild.plugins.kernels.small_gemm import small_gemm

aten = torch.ops.aten


def gemm_op(lowered: Lowered, part: Barrier) -> None:
    """Add one product.

    Raises:
        NoRule: Its rows do not lie below each other, or its operands differ in dtype.
    """
    node = part.node
    weight, bias = operands(node)
    view, out = part.inputs[0], lowered.parts.buffers[node.name]
    for other in (weight, bias):
        if other is not None and other.meta["val"].dtype != out.dtype:
            raise NoRule(node, f"a product of {out.dtype} and {other.meta['val'].dtype}")
    if lowered.parts.buffers[view.buffer].dtype != out.dtype:
        raise NoRule(node, f"a product of {lowered.parts.buffers[view.buffer].dtype} into {out.dtype}")
    stacked = len(size(weight)) == 3
    if len(size(weight)) not in (2, 3):
        raise NoRule(node, f"a product with a weight of shape {list(size(weight))}")
    strides = (stacked_rows if stacked else flat_rows)(node, view, out)
    rows, x_stride, x_batch, out_stride, out_batch = strides
    layout: Literal["nk", "kn"] = "nk" if node.target == aten.linear.default else "kn"
    *batch, first, second = (int(dim) for dim in size(weight))
    n, k = (first, second) if layout == "nk" else (second, first)
    op = GemmOp(
        **common(lowered, part, bias),
        weight=lowered.place(weight.name),
        rows=rows,
        n=n,
        k=k,
        batch=batch[0] if batch else 1,
        x_stride=x_stride,
        x_batch=x_batch,
        weight_layout=layout,
        weight_stride=second,
        weight_batch=first * second if batch else 0,
        out_stride=out_stride,
        out_batch=out_batch,
    )
    lowered.ops.append(op if batch else op.model_copy(update={"kernels": small_kernels(lowered, part, op)}))


def common(lowered: Lowered, part: Barrier, bias: fx.Node | None) -> dict[str, Any]:
    """Return the fields of a `GemmOp` that no form of the weight changes."""
    view, out = part.inputs[0], lowered.parts.buffers[part.node.name]
    return {
        "x": lowered.place(view.buffer, view.offset),
        "bias": None if bias is None else lowered.place(bias.name),
        "out": lowered.place(part.node.name),
        "dtype": dtype_name(out.dtype),
        "label": part.node.name,
    }


def matrix(strides: tuple[str, int, int, int, int], n: int, k: int) -> dict[str, Any]:
    """Return the fields of a `GemmOp` of one weight [n, k], rows of k numbers; strides: as `flat_rows` gives them."""
    rows, x_stride, x_batch, out_stride, out_batch = strides
    return {
        "rows": rows,
        "n": n,
        "k": k,
        "batch": 1,
        "x_stride": x_stride,
        "x_batch": x_batch,
        "weight_layout": "nk",
        "weight_stride": k,
        "weight_batch": 0,
        "out_stride": out_stride,
        "out_batch": out_batch,
    }


def small_kernels(lowered: Lowered, part: Barrier, op: GemmOp) -> tuple[SmallGemm, ...]:
    """Return the kernels that take the place of the library for few rows, if x lies as they read it."""
    dtype = lowered.parts.buffers[part.node.name].dtype
    hardware = lowered.hardware
    if not hardware.small_gemms or op.weight_layout != "nk" or not is_aligned(part.inputs[0], op.x_stride, dtype):
        return ()
    shape = GemmShape(op.n, op.k, op.dtype, bias=op.bias is not None)
    name = f"gemm_{op.n}x{op.k}"
    small = small_gemm(shape, hardware.sm, name=name, pdl=hardware.pdl, processors=hardware.processors)
    return small_launches(lowered, part.node, small, kernel_arguments(op))


def kernel_arguments(op: GemmOp) -> dict[str, Argument]:
    """Return what the kernels of a product take, by the names of their arguments."""
    found: dict[str, Argument] = {
        "x": op.x,
        "w": op.weight,
        "out": op.out,
        "x_stride": Number(value=str(op.x_stride)),
        "out_stride": Number(value=str(op.out_stride)),
        "rows": Number(value=op.rows),
    }
    return found if op.bias is None else found | {"bias": op.bias}


def is_aligned(view: View, x_stride: int, dtype: torch.dtype) -> bool:
    """Whether rows of x start at multiples of what the kernels read at once."""
    return all(number * dtype.itemsize % VECTOR_BYTES == 0 for number in (x_stride, view.offset))


def small_launches(
    lowered: Lowered, node: fx.Node, kernels: Sequence[SmallKernel], places: Mapping[str, Argument]
) -> tuple[SmallGemm, ...]:
    """Return the launches of kernels, each with workspaces of its own; places: by names of arguments."""
    found = []
    for small in kernels:
        mine = dict(places)
        for name, (dtype, needed) in small.workspaces.items():
            mine[name] = lowered.workspace(f"{node.name}_{name}_{small.most_rows}", dtype, str(needed))
        mine |= {name: lowered.counter(f"gemm_{name}", num_bytes) for name, num_bytes in small.states.items()}
        launches = tuple(
            KernelOp(
                kernel=lowered.kernel(spec), arguments=tuple(mine[name] for name in spec.signature), label=node.name
            )
            for spec in small.specs
        )
        found.append(SmallGemm(most_rows=small.most_rows, launches=launches))
    return tuple(found)


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return weight and bias."""
    if node.target == aten.linear.default:
        _, weight, bias = arguments(node)
        return weight, bias
    if node.target == aten.addmm.default:
        bias, _, weight, beta, alpha = arguments(node)
        if beta != 1 or alpha != 1:
            raise NoRule(node, f"addmm with beta {beta} and alpha {alpha}")
        return weight, bias
    return node.args[1], None  # type: ignore[return-value]


def flat_rows(node: fx.Node, view: View, out: Buffer) -> tuple[str, int, int, int, int]:
    """Return (rows, x stride, 0, out stride, 0) of a product with one matrix: all leading axes are rows.

    In memory the axis of tokens comes first in the result, so it must in x.
    """
    axes = [out.row_axis, *(place for place in range(len(view.shape) - 1) if place != out.row_axis)]
    stride, expected, each = int(view.shape[-1]), None, 1
    for place in reversed(axes):
        dim, step = view.shape[place], view.strides[place]  # type: ignore[index]
        if dim == 1:
            continue
        if expected is None:
            stride = step
        elif step != expected:
            raise NoRule(node, f"rows of strides {list(view.strides)}")
        if isinstance(dim, int):
            expected, each = step * dim, each * dim
    return row_text(out, each), stride, 0, int(out.shape[-1]), 0


def stacked_rows(node: fx.Node, view: View, out: Buffer) -> tuple[str, int, int, int, int]:
    """Return (rows, x stride, x batch, out stride, out batch) of one product for each matrix of a stack."""
    if len(view.shape) != 3 or out.row_axis != 1 or out.rows_each != 1:
        raise NoRule(node, f"a product of {list(view.shape)} with a stack of matrices")
    batch, _, n = out.shape
    return row_text(out, 1), view.strides[1], view.strides[0], int(batch) * int(n), int(n)


def row_text(out: Buffer, each: int) -> str:
    each *= out.rows_each
    return str(out.rows) if each == 1 else f"{out.rows} * {each}"
