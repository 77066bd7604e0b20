"""Products of 8-bit numbers with scales in a plan: `linear_scaled`, whose rows a row program has quantized."""

from __future__ import annotations

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cuda.gemm_ops import common, flat_rows, kernel_arguments, small_launches
from llmbuild.builder.targets.cuda.lowered import Lowered, dtype_name
from llmbuild.builder.targets.cuda.partition import Barrier
from llmbuild.builder.targets.cuda.sms import FLOAT8_SMS
from llmbuild.builder.targets.cuda.views import NoRule
from llmbuild.engine.launch_plan import GemmOp
from llmbuild.plugins.kernels.gemm_shape import FLOAT8, VECTOR_BYTES, GemmShape
from llmbuild.plugins.kernels.scaled_gemm import scaled_gemm


def scaled_gemm_op(lowered: Lowered, part: Barrier) -> None:
    """Add one product.

    Raises:
        NoRule: The GPU does not multiply such numbers, or sizes are not what kernels and library read.
    """
    node = part.node
    view, scales = part.inputs
    _, w, _, w_scale, bias, block, _ = arguments(node)
    out = lowered.parts.buffers[node.name]
    n, k = (int(dim) for dim in size(w))
    numbers = dtype_name(w.meta["val"].dtype)
    sm = lowered.hardware.sm
    if numbers == FLOAT8 and sm not in FLOAT8_SMS:
        raise NoRule(node, f"SM {sm} has no products of float8")
    if n % VECTOR_BYTES or k % VECTOR_BYTES:
        raise NoRule(node, f"a product of 8-bit numbers {n} x {k}: both must be multiples of {VECTOR_BYTES}")
    rows, x_stride, x_batch, out_stride, out_batch = flat_rows(node, view, out)
    if x_stride % VECTOR_BYTES or view.offset or scales.offset:
        raise NoRule(node, f"rows that lie {x_stride} bytes apart from {view.offset} on")
    shared = None if block[1] >= k else (block[0], block[1])
    shape = GemmShape(n, k, dtype_name(out.dtype), bias is not None, numbers, numbers, shared)
    op = GemmOp(
        **common(lowered, part, bias),
        weight=lowered.place(w.name),
        rows=rows,
        n=n,
        k=k,
        batch=1,
        x_stride=x_stride,
        x_batch=x_batch,
        weight_layout="nk",
        weight_stride=k,
        weight_batch=0,
        out_stride=out_stride,
        out_batch=out_batch,
        number_dtype=numbers,
        x_scale=lowered.place(scales.buffer),
        weight_scale=lowered.place(w_scale.name),
    )
    assert op.x_scale is not None and op.weight_scale is not None
    places = kernel_arguments(op) | {"x_scale": op.x_scale, "w_scale": op.weight_scale}
    hardware = lowered.hardware
    try:
        kernels = scaled_gemm(
            shape, sm, name=f"scaled_gemm_{n}x{k}", rows=rows, few=hardware.small_gemms, pdl=hardware.pdl
        )
    except ValueError as error:
        raise NoRule(node, str(error)) from None
    lowered.ops.append(op.model_copy(update={"kernels": small_launches(lowered, node, kernels, places)}))
