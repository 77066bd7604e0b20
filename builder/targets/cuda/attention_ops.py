"""Paged attention in a plan: split-KV decode and merge for steps of one token a sequence, the chunk kernel else."""

from __future__ import annotations

import torch

from llmbuild.builder.ir import Cast
from llmbuild.builder.passes.edit import arguments, rank, size
from llmbuild.builder.targets.cuda.lowered import Lowered, dtype_name
from llmbuild.builder.targets.cuda.partition import Barrier
from llmbuild.engine.launch_plan import Argument, KernelOp, Number, Place, When
from llmbuild.plugins.kernels.attention_hopper import chunk_spec
from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.plugins.kernels.paged_attention_decode import decode_plan
from llmbuild.plugins.kernels.spec import KernelSpec


def attention_ops(lowered: Lowered, part: Barrier) -> None:
    """Add the launches of one layer's attention."""
    node = part.node
    query, key, value, _, scale, window, softcap, sinks, slopes, k_scale, v_scale = arguments(node)
    heads, head_dim = (int(dim) for dim in size(query)[1:])
    kv_heads, value_dim = int(size(key)[1]), int(size(value)[2])
    shape = AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        scale=float(scale),
        dtype=dtype_name(query.meta["val"].dtype),
        kv_dtype=cache_dtype(key.meta["val"].dtype, lowered.hardware.sm),
        kv_scales="none" if k_scale is None else "layer" if rank(k_scale) == 1 else "token",
        page=lowered.limits.block_size,
        window=window,
        softcap=softcap,
        sinks=sinks is not None,
        alibi=slopes is not None,
    )
    hardware = lowered.hardware
    decode = decode_plan(shape, hardware.sm, processors=hardware.processors, pdl=hardware.pdl)
    chunks = chunk_spec(shape, hardware.sm, processors=hardware.processors, pdl=hardware.pdl)
    queries, keys, values, *scales = part.inputs
    places: dict[str, Argument] = {
        "q": lowered.place(queries.buffer),
        "keys": lowered.place(keys.buffer),
        "values": lowered.place(values.buffer),
        "out": lowered.place(node.name),
        "partial": lowered.workspace(f"{node.name}_partial", "float32", decode.partial_bytes),
        "sums": lowered.workspace(f"{node.name}_sums", "float32", decode.sums_bytes),
        "table_stride": Number(value=str(lowered.limits.table_stride)),
        "sequences": Number(value="B"),
        "splits": Number(value=decode.splits),
    }
    places |= {name: lowered.place(name) for name in ("block_tables", "seq_lens", "cu_q_lens")}
    if k_scale is not None:
        names = [view.buffer for view in scales] or [k_scale.name, v_scale.name]
        places |= zip(("k_scales", "v_scales"), map(lowered.place, names), strict=True)
    for name, operand in (("sinks", sinks), ("slopes", slopes)):
        if operand is not None:
            places[name] = wide(lowered, operand.name)

    def launch(spec: KernelSpec, when: When) -> KernelOp:
        kernel = lowered.kernel(spec)
        ordered = tuple(places[name] for name in spec.signature)
        return KernelOp(kernel=kernel, arguments=ordered, when=when, label=node.name)

    lowered.ops += [launch(decode.attend, "decode"), launch(decode.merge, "decode"), launch(chunks, "mixed")]


def cache_dtype(dtype: torch.dtype, sm: int) -> str:
    """Return what the kernels take a pool for: bytes are e4m3, a type that SMs before 89 do not have."""
    return "float8_e4m3fn" if dtype == torch.uint8 and sm >= 89 else dtype_name(dtype)


def wide(lowered: Lowered, name: str) -> Place:
    """Return a weight of one number a head in float32, as the kernels read it."""
    expression = lowered.program.weights[name]
    if expression.dtype == torch.float32:
        return lowered.place(name)
    return lowered.weight(f"{name}_float32", Cast(expression, torch.float32))
