"""Products with block-quantized weights, and lookups in such tables, in a plan."""

from __future__ import annotations

import torch

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cuda.block_weight import BlockWeight
from llmbuild.builder.targets.cuda.gemm_ops import (
    common,
    flat_rows,
    is_aligned,
    kernel_arguments,
    matrix,
    small_launches,
)
from llmbuild.builder.targets.cuda.lowered import Lowered, dtype_name
from llmbuild.builder.targets.cuda.partition import Barrier
from llmbuild.builder.targets.cuda.views import NoRule
from llmbuild.engine.launch_plan import Argument, GemmOp, KernelOp
from llmbuild.plugins.kernels.block_gemm import block_gemm
from llmbuild.plugins.kernels.embedding_blockwise import embedding_blockwise_spec
from llmbuild.plugins.kernels.gemm_shape import GemmShape


def block_gemm_op(lowered: Lowered, part: Barrier) -> None:
    """Add one `linear_blockwise`, which kernels of the engine compute for any number of rows.

    Raises:
        NoRule: Its rows do not lie below each other in 16-byte steps, or there are no kernels for such blocks.
    """
    node, view = part.node, part.inputs[0]
    _, q, scale, offset, bias, bits, block_size, zero = arguments(node)
    out = lowered.parts.buffers[node.name]
    strides = flat_rows(node, view, out)
    rows, x_stride = strides[:2]
    if not is_aligned(view, x_stride, out.dtype):
        raise NoRule(node, f"rows that lie {x_stride} elements apart, which is no multiple of 16 bytes")
    n, k = (int(dim) for dim in size(q))
    weight = BlockWeight(lowered, node, q, scale, offset, (bits, block_size, zero))
    shape = GemmShape(n, k, dtype_name(out.dtype), bias=bias is not None)
    op = GemmOp(
        **common(lowered, part, bias),
        weight=weight.values,
        **matrix(strides, n, k),
    )
    places = kernel_arguments(op) | {"w_scale": lowered.place(scale.name)}
    if offset is not None:
        places["w_offset"] = lowered.place(offset.name)
    hardware = lowered.hardware
    try:
        small = block_gemm(shape, weight.shape, hardware.sm, name=f"block_gemm_{n}x{k}", rows=rows, pdl=hardware.pdl)
    except ValueError as error:
        raise NoRule(node, str(error)) from None
    lowered.ops.append(op.model_copy(update={"kernels": small_launches(lowered, node, small, places)}))


def block_embedding_op(lowered: Lowered, part: Barrier) -> None:
    """Add one `embedding_blockwise`.

    Raises:
        NoRule: There are no kernels for such blocks, or ids are not int32.
    """
    node, view = part.node, part.inputs[0]
    ids, q, scale, offset, bits, block_size, zero, dtype = arguments(node)
    if ids.meta["val"].dtype != torch.int32 or view.offset or len(view.shape) != 1:
        raise NoRule(node, f"ids of {ids.meta['val'].dtype} {list(view.shape)}")
    weight = BlockWeight(lowered, node, q, scale, offset, (bits, block_size, zero))
    try:
        spec = embedding_blockwise_spec(
            "embedding", weight.shape, k=int(size(q)[1]), dtype=dtype_name(dtype), pdl=lowered.hardware.pdl
        )
    except ValueError as error:
        raise NoRule(node, str(error)) from None
    places: dict[str, Argument] = {
        "ids": lowered.place(view.buffer),
        "w": weight.values,
        "w_scale": lowered.place(scale.name),
        "out": lowered.place(node.name),
    }
    if offset is not None:
        places["w_offset"] = lowered.place(offset.name)
    ordered = tuple(places[name] for name in spec.signature)
    lowered.ops.append(KernelOp(kernel=lowered.kernel(spec), arguments=ordered, label=node.name))
