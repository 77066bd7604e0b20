"""GEMMs of few rows, faster than a library that is made for many: which kernels compute how many rows."""

from __future__ import annotations

from llmbuild.plugins.kernels.gemm_shape import GemmShape, SmallKernel
from llmbuild.plugins.kernels.row_gemm import row_kernel
from llmbuild.plugins.kernels.stream_gemm import fits, stream_kernel

# Most rows of each kernel that streams weights. A step of Llama-3.1-8B on an H200, ms, with them and with the library:
# 2 rows 4.11, 4.49; 8 rows 4.25, 4.59; 32 rows 4.84, 5.01; 64 rows 5.25, 5.02. In float8 2.67, 3.06; 2.84, 3.11; 3.43,
# 3.48; 3.47, 3.46.
STREAM_ROWS = (16, 32)


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
        for rows in STREAM_ROWS:
            stream = stream_kernel(shape, name=f"{name}_m{rows}", most_rows=rows, processors=processors, pdl=pdl)
            found.append(stream)
    return tuple(found)
