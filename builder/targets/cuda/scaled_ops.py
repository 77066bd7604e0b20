"""Products of 8-bit numbers in a plan, whose rows a row program has quantized: `linear_scaled`, `linear_numbers`."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cuda.gemm_ops import common, flat_rows, kernel_arguments, matrix, small_launches
from llmbuild.builder.targets.cuda.lowered import Lowered, dtype_name
from llmbuild.builder.targets.cuda.partition import Barrier
from llmbuild.builder.targets.cuda.sms import FLOAT8_SMS
from llmbuild.builder.targets.cuda.views import NoRule
from llmbuild.engine.launch_plan import GemmOp
from llmbuild.plugins.kernels.gemm_shape import FLOAT8, VECTOR_BYTES, GemmShape, SmallKernel
from llmbuild.plugins.kernels.scaled_gemm import scaled_gemm
from llmbuild.plugins.kernels.small_gemm import small_gemm


def scaled_gemm_op(lowered: Lowered, part: Barrier) -> None:
    """Add one `linear_scaled`.

    Raises:
        NoRule: The GPU does not multiply such numbers, or sizes are not what kernels and library read.
    """
    node = part.node
    _, w, _, w_scale, bias, block, _ = arguments(node)
    shared = None if block[0] == 1 else (block[0], block[1])
    op, shape = number_gemm(lowered, part, w, bias, shared)
    scales = part.inputs[1]
    if scales.offset:
        raise NoRule(node, f"scales that begin {scales.offset} numbers behind others")
    op = op.model_copy(update={"x_scale": lowered.place(scales.buffer), "weight_scale": lowered.place(w_scale.name)})
    assert op.x_scale is not None and op.weight_scale is not None
    places = kernel_arguments(op) | {"x_scale": op.x_scale, "w_scale": op.weight_scale}
    hardware, name = lowered.hardware, f"scaled_gemm_{op.n}x{op.k}"
    few, pdl = hardware.small_gemms, hardware.pdl
    try:
        kernels = scaled_gemm(shape, hardware.sm, name=name, rows=op.rows, few=few, pdl=pdl)
    except ValueError as error:
        raise NoRule(node, str(error)) from None
    lowered.ops.append(op.model_copy(update={"kernels": small_launches(lowered, node, kernels, places)}))


def number_gemm_op(lowered: Lowered, part: Barrier) -> None:
    """Add one `linear_numbers`: by the library, but for few rows. Raises as `scaled_gemm_op`."""
    op, shape = number_gemm(lowered, part, arguments(part.node)[1], None, None)
    hardware, name = lowered.hardware, f"number_gemm_{op.n}x{op.k}"
    kernels: tuple[SmallKernel, ...] = ()
    if hardware.small_gemms:
        shape = replace(shape, scales=False)
        kernels = small_gemm(shape, hardware.sm, name=name, pdl=hardware.pdl, processors=hardware.processors)
    launches = small_launches(lowered, part.node, kernels, kernel_arguments(op))
    lowered.ops.append(op.model_copy(update={"kernels": launches}))


def number_gemm(
    lowered: Lowered, part: Barrier, w: fx.Node, bias: fx.Node | None, block: tuple[int, int] | None
) -> tuple[GemmOp, GemmShape]:
    """Return the op without scales and kernels, and its shape."""
    node, view = part.node, part.inputs[0]
    out = lowered.parts.buffers[node.name]
    n, k = (int(dim) for dim in size(w))
    numbers = dtype_name(w.meta["val"].dtype)
    sm = lowered.hardware.sm
    if numbers == FLOAT8 and sm not in FLOAT8_SMS:
        raise NoRule(node, f"SM {sm} has no products of float8")
    if n % VECTOR_BYTES or k % VECTOR_BYTES:
        raise NoRule(node, f"a product of 8-bit numbers {n} x {k}: both must be multiples of {VECTOR_BYTES}")
    strides = flat_rows(node, view, out)
    x_stride = strides[1]
    if x_stride % VECTOR_BYTES or view.offset:
        raise NoRule(node, f"rows that lie {x_stride} bytes apart from {view.offset} on")
    op = GemmOp(
        **common(lowered, part, bias),
        weight=lowered.place(w.name),
        **matrix(strides, n, k),
        number_dtype=numbers,
    )
    return op, GemmShape(n, k, dtype_name(out.dtype), bias is not None, numbers, numbers, block)
