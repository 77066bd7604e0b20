"""What GEMM kernels share about their tiles: numbers to float32, weights on their way before they are needed."""

from __future__ import annotations

import triton
import triton.language as tl

from llmbuild.plugins.kernels.float8 import e4m3_to_float32

LINE = tl.constexpr(128)  # bytes that the L2 cache takes at once


@triton.jit
def widen(tile):
    """A tile of floats -> float32; uint8 are the bits of float8_e4m3fn."""
    if tile.dtype == tl.uint8:
        wide = e4m3_to_float32(tile)
    else:
        wide = tile.to(tl.float32)
    return wide


@triton.jit
def fits(tile, dtype: tl.constexpr):
    """A tile of floats as an operand of `tl.dot` beside one of `dtype`."""
    if tile.dtype == tl.uint8:
        operand = e4m3_to_float32(tile).to(dtype)
    else:
        operand = tile.to(dtype)
    return operand


@triton.jit
def prefetch_rows(base, rows, begin, end, stride, BYTES: tl.constexpr, LINES: tl.constexpr):
    """Ask for columns begin .. end - 1 of some rows, LINES cache lines at most, without waiting for them.

    base: the matrix; rows: int [R], in bounds; stride: elements from row to row, BYTES each.
    For what the kernel before this one does not write: it may come before `gdc_wait`.
    """
    lines = begin + tl.arange(0, LINES) * (LINE // BYTES)
    columns = tl.minimum(lines, end - 1)
    addresses = base + rows[:, None] * stride + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
