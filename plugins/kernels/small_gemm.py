"""GEMMs of few rows, faster than a library that is made for many: which kernels compute how many rows."""

from __future__ import annotations

from llmbuild.plugins.kernels.gemm_shape import GemmShape, SmallKernel
from llmbuild.plugins.kernels.row_gemm import row_kernel
from llmbuild.plugins.kernels.stream_gemm import fits, stream_kernel

# Most rows of each kernel that streams weights, by the bytes of a number: those for which it takes less time than the
# library on an H200 (docs/performance.md). The library has none of the kernels that start early.
STREAM_ROWS = {2: (16, 32, 64), 1: (16, 32)}


def small_gemm(
    shape: GemmShape, sm: int, *, name: str, pdl: bool = False, processors: int | None = None
) -> tuple[SmallKernel, ...]:
    """Return the kernels of one GEMM: for one row, and on SM 90 for each of `STREAM_ROWS`.

    sm: compute capability as 90. name: of the kernels is this and something after it. pdl: each kernel may start
    before the one before it ends, asks for weights, and waits where it reads x (SM 90 and up). processors: of the card,
    None for the usual one.
    """
    found = [row_kernel(shape, sm, name=f"{name}_m1", pdl=pdl)]
    if fits(shape, sm):
        for rows in STREAM_ROWS[shape.w_bytes]:
            stream = stream_kernel(shape, name=f"{name}_m{rows}", most_rows=rows, processors=processors, pdl=pdl)
            found.append(stream)
    return tuple(found)
