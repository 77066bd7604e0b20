"""`llmbuild::linear_scaled` on a GPU: which kernels compute how many rows of it, and what is left to the library."""

from __future__ import annotations

from functools import partial

from llmbuild.plugins.kernels.gemm_shape import FLOAT8, GemmShape, SmallKernel
from llmbuild.plugins.kernels.row_gemm import row_kernel
from llmbuild.plugins.kernels.scaled_tile_gemm import scaled_tile_kernel
from llmbuild.plugins.kernels.stream_gemm import fits, stream_kernel
from llmbuild.plugins.kernels.tile_gemm import tile_kernel

MOST_ROWS = (16, 32, 64)  # of each kernel between those for one row and for many
LIBRARY_SMS = (90,)  # on which cuBLASLt multiplies float8 with a scale for each row of either operand


def library_computes(shape: GemmShape, sm: int) -> bool:
    """Whether the GEMM library has products of such numbers and scales."""
    wide_bias = shape.bias and shape.dtype == "float32"  # the library adds a bias in bfloat16 to those
    return shape.x_dtype == FLOAT8 and shape.block is None and not wide_bias and sm in LIBRARY_SMS


def scaled_gemm(
    shape: GemmShape, sm: int, *, name: str, rows: str = "T", few: bool = True, pdl: bool = False
) -> tuple[SmallKernel, ...]:
    """Return the kernels of one product: for one row, for few, and for any number where the library has none.

    Args:
        shape: x and w are both float8, or both int8.
        sm: Compute capability as 90. SMs before 89 have no products of float8.
        name: Of the kernels is this and something after it.
        rows: M, an expression.
        few: Whether kernels for few rows are wanted.
        pdl: As in `row_kernel`.
    """
    found: list[SmallKernel] = []
    if few and shape.block is None:
        found.append(row_kernel(shape, sm, name=f"{name}_m1", pdl=pdl))
    if few:
        few_rows = partial(stream_kernel, shape) if fits(shape, sm) else partial(tile_kernel, shape, sm)
        found += [few_rows(name=f"{name}_m{most}", most_rows=most, pdl=pdl) for most in MOST_ROWS]
    if not library_computes(shape, sm):
        found.append(scaled_tile_kernel(shape, sm, name=f"{name}_many", rows=rows, pdl=pdl))
    return tuple(found)
