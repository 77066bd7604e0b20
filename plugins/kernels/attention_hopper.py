"""Paged attention of chunks on SM 90: what `paged_attention_prefill` computes, for plain layers, with warps by trade.

    warps 0-3, 4-7   64 rows of queries each: products on the matrix units (wgmma) and the softmax   ..._tile.py
    warps 8-11       copy queries, keys and values into shared memory                                ..._copy.py

Between them lies a ring of slots, one tile of keys or values each. A slot has two barriers: `full`, at which the
copying threads arrive, and `empty`, at which both multiplying groups do. The kernel stays: as many programs as there
are processors take one piece of work after the other (..._work.py), and the first tiles of the next are copied while
the last product of this one is computed. This is the design of FlashAttention-3 (Shah et al., 2024) over a paged cache.

It is written in Gluon, Triton's language below tiles, which has no interpreter: on the CPU its place is taken by
`paged_attention_prefill`, which has the same arguments.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from llmbuild.plugins.kernels.attention_hopper_copy import producer
from llmbuild.plugins.kernels.attention_hopper_tile import consumer
from llmbuild.plugins.kernels.attention_shape import PROCESSORS, AttentionShape
from llmbuild.plugins.kernels.paged_attention_prefill import prefill_spec
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of

ROWS = 128  # of a piece of work: new tokens times query heads of a KV head
BLOCK_N = 128  # keys of a tile


@gluon.jit(do_not_specialize=["table_stride", "sequences"])
def attention_hopper(
    q,
    keys,
    values,
    block_tables,
    seq_lens,
    cu_q_lens,
    out,
    table_stride,
    sequences,
    SCALE: gl.constexpr,
    PAGE: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Any grid along x. Arguments as those of `paged_attention_prefill`; keys and values have the dtype of q."""
    kind: gl.constexpr = q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(kind, [2, 64, HEAD_DIM], swizzled)
    ring = gl.allocate_shared_memory(kind, [SLOTS, BLOCK_N, HEAD_DIM], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=128)
        mbarrier.init(empty.index(slot), count=2)
    mbarrier.init(q_free, count=2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gl.warp_specialize(
        [
            (consumer, (0, out, seq_lens, cu_q_lens, sequences, q_tile, ring, full, empty, q_free,
                        SCALE, HEADS, KV_HEADS, BLOCK_Q)),
            (consumer, (1, out, seq_lens, cu_q_lens, sequences, q_tile, ring, full, empty, q_free,
                        SCALE, HEADS, KV_HEADS, BLOCK_Q)),
            (producer, (q, keys, values, block_tables, seq_lens, cu_q_lens, table_stride, sequences,
                        q_tile, ring, full, empty, q_free, PAGE, HEADS, KV_HEADS, BLOCK_Q)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def fits(shape: AttentionShape, sm: int) -> bool:
    """Whether the kernel computes a layer's attention on an SM."""
    plain = shape.window is None and shape.softcap is None and not shape.sinks and not shape.alibi
    return (
        sm == 90
        and plain
        and shape.head_dim == shape.value_dim
        and shape.head_dim in (64, 128)
        and shape.dtype in ("float16", "bfloat16")
        and shape.kv_dtype == shape.dtype
        and shape.kv_scales == "none"
        and 64 % shape.group == 0
    )


def hopper_prefill_spec(
    shape: AttentionShape,
    *,
    name: str = "attention_prefill",
    processors: int | None = None,
    pdl: bool = False,
) -> KernelSpec:
    """Return the kernel for a layer that `fits`; `sequences` is B. processors, pdl: as in `decode_plan`."""
    block_q = ROWS // shape.group
    # Measured on an H200 with heads of 128 channels: 5 slots, all that there is room for, are 5 % faster than 4.
    constants = {
        "SCALE": shape.scale,
        "PAGE": shape.page,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_Q": block_q,
        "BLOCK_N": BLOCK_N,
        "SLOTS": 5 if shape.head_dim == 128 else 8,
        "CONSUMER_REGISTERS": 232,
        "PRODUCER_REGISTERS": 40,
        "PDL": pdl,
    }
    types = shape.types() | {"sequences": "i32"}
    return KernelSpec(
        name,
        attention_hopper,
        **arguments_of(attention_hopper, types, constants),
        grid=(f"min({processors or PROCESSORS[90]}, {shape.kv_heads} * (T // {block_q} + B))", "1", "1"),
        num_warps=4,  # of the first group; the compiled kernel says that there are 12
        options={"launch_pdl": True} if pdl else {},
        interpreted=prefill_spec(shape, 90, name=name, pdl=pdl),
    )


def chunk_spec(shape: AttentionShape, sm: int, *, processors: int | None = None, pdl: bool = False) -> KernelSpec:
    """Return the fastest kernel of a layer's attention over chunks. sm, processors, pdl: as in `decode_plan`."""
    if fits(shape, sm):
        return hopper_prefill_spec(shape, processors=processors, pdl=pdl)
    return prefill_spec(shape, sm, pdl=pdl)
