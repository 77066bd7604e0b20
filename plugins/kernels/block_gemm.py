"""`llmbuild::linear_blockwise` on a GPU: which kernels compute how many rows of it."""

from __future__ import annotations

from llmbuild.plugins.kernels.block_few_gemm import block_few_kernel, reads_few
from llmbuild.plugins.kernels.block_layout import BlockShape
from llmbuild.plugins.kernels.block_row_gemm import block_row_kernel
from llmbuild.plugins.kernels.block_tile_gemm import block_tile_kernel
from llmbuild.plugins.kernels.gemm_shape import GemmShape, SmallKernel

MOST_ROWS = (16, 64)  # of each kernel between those for one row and for any number
FEW_ROWS = (8, 16)  # of each kernel of blocks of 4 bits that are wide enough for a product each


def block_gemm(
    shape: GemmShape, block: BlockShape, sm: int, *, name: str, rows: str = "T", pdl: bool = False
) -> tuple[SmallKernel, ...]:
    """Return the kernels of one product: for one row or a few, for more, and for any number (most_rows None).

    w is as `block_layout.pack_blocks` leaves it, w_scale and w_offset are [N, ceil(K / block_size)].
    sm: compute capability as 90. name: of the kernels is this and something after it. rows: M, an expression. pdl: each
    kernel may start before the one before it ends, and waits where it reads x (SM 90 and up).

    Raises:
        ValueError: The shape names a dtype of its own for x or w, or blocks are not of a size that kernels read.
    """
    if shape.w_dtype is not None:
        raise ValueError(f"blocks of integers, yet weights of {shape.w_dtype}")
    any_number = block_tile_kernel(shape, block, sm, name=f"{name}_many", most_rows=None, rows=rows, pdl=pdl)
    if reads_few(shape, block):
        first = [
            block_few_kernel(shape, block, sm, name=f"{name}_m{most}", most_rows=most, pdl=pdl) for most in FEW_ROWS
        ]
    else:
        first = [block_row_kernel(shape, block, name=f"{name}_m1", pdl=pdl)]
    tiles = (
        block_tile_kernel(shape, block, sm, name=f"{name}_m{most}", most_rows=most, pdl=pdl)
        for most in MOST_ROWS
        if most > (first[-1].most_rows or 0)
    )
    return (*first, *tiles, any_number)
