"""A few rows times a weight matrix on SM 90, with warps by trade: weights stream through shared memory without a pause.

    warps 0-3     multiply on the matrix units (wgmma), the weights as their left operand     ..._multiply.py
    warps 4-7     copy weights into a ring of slots                                            ..._copy.py
    warps 8-11    copy the rows of x that meet them

The work is cut into units, one step over K of one tile of 64 columns of the result, and each program takes as many, one
after the other, wherever tiles begin and end ("stream-K", Osama et al., 2023): all processors read weights for as long.
A slot has two barriers: `full`, at which the copying threads arrive, and `empty`, at which those that multiply do.

It is written in Gluon, Triton's language below tiles, which has no interpreter: on the CPU its place is taken by
`tile_gemm`, which has the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from llmbuild.plugins.kernels.attention_shape import PROCESSORS, SHARED_BYTES
from llmbuild.plugins.kernels.gemm_shape import FLOAT8, FLOATS, VECTOR_BYTES, GemmShape, SmallKernel
from llmbuild.plugins.kernels.spec import KernelSpec, arguments_of
from llmbuild.plugins.kernels.stream_gemm_copy import copy_rows, copy_weights
from llmbuild.plugins.kernels.stream_gemm_multiply import multiply
from llmbuild.plugins.kernels.tile_gemm import TileTiling, tile_kernel

BLOCK_N = 64  # columns of a tile
STEP_BYTES = (256, 128)  # of a row of the weight, the first that divides it
MOST_SLOTS = 24
REGISTERS = 80  # of a thread, before the groups share them out: kernels that wait beside this one find room
COPY_REGISTERS = 32
SPLIT_STEPS = 12  # that it costs about as much as to put a tile together from parts


@gluon.jit(do_not_specialize=["rows", "x_stride", "out_stride"])
def stream_gemm(
    x,
    w,
    x_scale,
    w_scale,
    bias,
    out,
    partial,
    counters,
    rows,
    x_stride,
    out_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    X_ALIGN: gl.constexpr,
    OUT_ALIGN: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SLOTS: gl.constexpr,
    SEGMENTS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Any grid along x. Arguments as those of `tile_gemm`, rows <= BLOCK_M; K a multiple of BLOCK_K.

    SEGMENTS: programs that share a tile at most. partial: float32 [2 * programs, BLOCK_N, BLOCK_M]; counters: int32
    for each tile, zero before and after each launch. Both only where SEGMENTS > 1.
    """
    STEPS: gl.constexpr = K // BLOCK_K
    UNITS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * STEPS
    kind: gl.constexpr = w.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, kind.primitive_bitwidth, 2)
    w_ring = gl.allocate_shared_memory(kind, [SLOTS, BLOCK_N, BLOCK_K], swizzled)
    x_ring = gl.allocate_shared_memory(kind, [SLOTS, BLOCK_M, BLOCK_K], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=256)
        mbarrier.init(empty.index(slot), count=1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gl.warp_specialize(
        [
            (multiply, (out, x_scale, w_scale, bias, partial, counters, rows, out_stride, w_ring, x_ring, full, empty,
                        N, OUT_ALIGN, UNITS, STEPS, SEGMENTS)),
            (copy_weights, (w, w_ring, full, empty, N, K, UNITS, STEPS)),
            (copy_rows, (x, rows, x_stride, x_ring, full, empty, X_ALIGN, UNITS, STEPS, PDL)),
        ],
        [4, 4],
        [COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def fits(shape: GemmShape, sm: int) -> bool:
    """Whether the kernel computes a product on an SM: of 16-bit floats, or of float8 with at most a scale a row."""
    plain = shape.w_dtype is None and shape.dtype in ("float16", "bfloat16")
    float8 = shape.w_dtype == shape.x_dtype == FLOAT8
    return sm == 90 and (plain or float8) and shape.block is None and shape.k * shape.w_bytes % STEP_BYTES[-1] == 0


@dataclass(frozen=True)
class Share:
    """programs: of the grid. segments: programs that share a tile at most."""

    programs: int
    segments: int


def share(tiles: int, steps: int, processors: int) -> Share:
    """Return how many programs take the units of a product: the least time, if all are as large and splits cost some.

    Programs with equal numbers of units go in step: such a number is taken where it needs no more than a twelfth more
    of them than the best.
    """
    units = tiles * steps

    def segments(programs: int) -> int:
        def of(unit: int) -> int:
            return ((unit + 1) * programs - 1) // units

        return max(of(tile * steps + steps - 1) - of(tile * steps) + 1 for tile in range(tiles))

    def cost(programs: int) -> float:
        alone = units % programs == 0 and units // programs % steps == 0
        uneven = 1.0 if units % programs == 0 else 13 / 12
        return -(-units // programs) * uneven + (0 if alone else SPLIT_STEPS)

    most = min(processors, units)
    programs = min(range(max(1, most // 2), most + 1), key=lambda each: (cost(each), each))
    return Share(programs, segments(programs))


def stream_kernel(
    shape: GemmShape, *, name: str, most_rows: int, processors: int | None = None, pdl: bool = False
) -> SmallKernel:
    """Return the kernel of a product that `fits` for up to `most_rows` rows: 16, 32 or 64. pdl: as in `row_kernel`."""
    item = shape.w_bytes
    step = next(size for size in STEP_BYTES if shape.k * item % size == 0)
    tiles = -(-shape.n // BLOCK_N)
    shared = share(tiles, shape.k * item // step, processors or PROCESSORS[90])
    room = (SHARED_BYTES[90] - 5) * 1024
    constants = shape.constants() | {
        "X_ALIGN": VECTOR_BYTES // shape.x_bytes,
        "OUT_ALIGN": shape.out_align,
        "BLOCK_M": most_rows,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": step // item,
        "SLOTS": min(MOST_SLOTS, room // ((BLOCK_N + most_rows) * step)),
        "SEGMENTS": shared.segments,
        "COPY_REGISTERS": COPY_REGISTERS,
        "PDL": pdl,
    }
    alone = shared.segments == 1
    types = shape.types(90) | {"counters": "*i32"}
    types = {key: kind for key, kind in types.items() if not alone or key not in ("partial", "counters")}
    tile = TileTiling(most_rows, 256, 256, 1, 4, 1)  # an interpreter is the faster, the fewer programs and steps
    spec = KernelSpec(
        name,
        stream_gemm,
        **arguments_of(stream_gemm, types, constants),
        grid=(str(shared.programs), "1", "1"),
        num_warps=4,  # of the first group; the compiled kernel says that there are 12
        options={"maxnreg": REGISTERS, **({"launch_pdl": True} if pdl else {})},
        interpreted=tile_kernel(shape, 90, name=name, most_rows=most_rows, tiling=tile, pdl=pdl).specs[0],
    )
    if alone:
        return SmallKernel(most_rows, (spec,))
    sums = 2 * shared.programs * BLOCK_N * most_rows * FLOATS["float32"]
    return SmallKernel(most_rows, (spec,), {"partial": ("float32", sums)}, {"counters": tiles * 4})
