"""GEMMs of few rows, faster than a library that is made for many: which kernels compute how many rows."""

from __future__ import annotations

from llmbuild.plugins.kernels.gemm_shape import GemmShape, SmallKernel
from llmbuild.plugins.kernels.row_gemm import row_kernel
from llmbuild.plugins.kernels.tile_gemm import tile_kernel

MOST_ROWS = (16,)  # of each kernel that uses tensor cores


def small_gemm(
    shape: GemmShape, sm: int, *, name: str, pdl: bool = False, most_rows: tuple[int, ...] = MOST_ROWS
) -> tuple[SmallKernel, ...]:
    """Return the kernels of one GEMM: for one row, then for each of `most_rows` (powers of 2 from 16, rising).

    sm: compute capability as 90. name: of the kernels is this and something after it. pdl: each kernel may start
    before the one before it ends, asks for weights, and waits where it reads x (SM 90 and up).
    """
    tiles = (tile_kernel(shape, sm, name=f"{name}_m{rows}", most_rows=rows, pdl=pdl) for rows in most_rows)
    return (row_kernel(shape, sm, name=f"{name}_m1", pdl=pdl), *tiles)
