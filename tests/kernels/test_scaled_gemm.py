"""Products of 8-bit numbers with scales against torch in float64: a row, few rows, any number; scales of blocks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES
from llmbuild.plugins.kernels.gemm_shape import FLOAT8, INT8, GemmShape, SmallKernel
from llmbuild.plugins.kernels.row_gemm import RowTiling, row_kernel
from llmbuild.plugins.kernels.scaled_gemm import library_computes, scaled_gemm
from llmbuild.plugins.kernels.scaled_tile_gemm import ScaledTiling, scaled_tile_kernel
from llmbuild.plugins.kernels.tile_gemm import TileTiling, tile_kernel
from llmbuild.plugins.scaled_ops import spread
from support.gemm_cases import DTYPES, TOLERANCE, assert_near, compute

NUMBERS = {FLOAT8: torch.float8_e4m3fn, INT8: torch.int8}


def shape_of(n: int, k: int, numbers: str, *, block: tuple[int, int] | None = None, bias: bool = True) -> GemmShape:
    return GemmShape(n, k, "bfloat16", bias, numbers, numbers, block)


def check(kernel: SmallKernel, shape: GemmShape, rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = NUMBERS[str(shape.w_dtype)]
    factor = 40.0 if kind == torch.int8 else 1.0
    x = (torch.randn(rows, shape.k, generator=generator) * factor).to(kind)
    w = (torch.randn(shape.n, shape.k, generator=generator) * factor).to(kind)
    block = shape.block or (1, shape.k)
    w_scale = torch.rand(-(-shape.n // block[0]), shape.k // block[1], generator=generator) + 0.1
    x_scale = torch.rand(rows, shape.k // block[1], generator=generator) + 0.1
    bias = torch.randn(shape.n, generator=generator).bfloat16()
    wide = x.double() * x_scale.double().repeat_interleave(block[1], 1)
    expected = wide @ (w.double() * spread(w_scale, block, (shape.n, shape.k)).double()).T
    given: dict[str, Any] = {"w": w, "w_scale": w_scale, "x_scale": x_scale}
    if shape.bias:
        given["bias"] = bias
        expected += bias.double()
    actual = compute(kernel, x, shape.n, DTYPES[shape.dtype], **given)
    assert_near(actual, expected, TOLERANCE[shape.dtype])
    return actual


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.sampled_from([FLOAT8, INT8]),
    n=st.sampled_from([16, 48, 80]),
    k=st.sampled_from([16, 48, 64]),
    rows=st.integers(1, 40),
    band=st.sampled_from([1, 2, 8]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_number_of_rows(numbers: str, n: int, k: int, rows: int, band: int, bias: bool, seed: int) -> None:
    shape = shape_of(n, k, numbers, bias=bias)
    tiling = ScaledTiling(16, 32, 32, band, 4, 2)
    check(scaled_tile_kernel(shape, 90, name="gemm", rows="T", tiling=tiling), shape, rows, seed)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_few_rows(numbers: str, swap: bool, splits: int) -> None:
    shape = shape_of(48, 128, numbers)
    tiling = TileTiling(16, 16, 32, splits, 4, 2, swap)
    check(tile_kernel(shape, 90, name="gemm", tiling=tiling), shape, 7)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_one_row(numbers: str) -> None:
    shape = shape_of(48, 80, numbers)
    check(row_kernel(shape, 90, name="gemm", tiling=RowTiling(2, 64, 1)), shape, 1)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_blocks_of_scales_with_few_rows(swap: bool, splits: int) -> None:
    shape = shape_of(80, 128, FLOAT8, block=(32, 32))  # the last block has half its rows
    tiling = TileTiling(16, 16, 16, splits, 4, 2, swap)
    check(tile_kernel(shape, 90, name="gemm", tiling=tiling), shape, 5)


def test_blocks_of_scales_with_any_number_of_rows() -> None:
    shape = shape_of(80, 96, FLOAT8, block=(32, 32))
    tiling = ScaledTiling(16, 16, 16, 2, 4, 2)
    check(scaled_tile_kernel(shape, 90, name="gemm", rows="T", tiling=tiling), shape, 37)


def test_which_kernels_there_are() -> None:
    rows = lambda shape, sm: [each.most_rows for each in scaled_gemm(shape, sm, name="gemm")]  # noqa: E731
    plain, blocks = shape_of(256, 256, FLOAT8), shape_of(256, 256, FLOAT8, block=(128, 128))
    assert rows(plain, 90) == [1, 16, 32, 64] and library_computes(plain, 90)
    assert rows(plain, 89) == [1, 16, 32, 64, None]
    assert rows(blocks, 90) == [16, 32, 64, None]
    assert rows(shape_of(256, 256, INT8), 90) == [1, 16, 32, 64, None]
    assert [each.most_rows for each in scaled_gemm(plain, 90, name="gemm", few=False)] == []


@pytest.mark.parametrize("block", [None, (128, 128)], ids=["rows", "blocks"])
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("sm", [90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (89, 100, 120))])
def test_it_compiles(sm: int, numbers: str, block: tuple[int, int] | None) -> None:
    shape = GemmShape(6144, 4096, "bfloat16", False, numbers, numbers, block)
    for kernel in scaled_gemm(shape, sm, name="gemm", pdl=sm >= 90):
        for spec in kernel.specs:
            assert compile_spec(spec, sm).launch.shared <= SHARED_BYTES[sm] * 1024


def test_blocks_that_are_not_made_of_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks of \(32, 32\) are not made of tiles"):
        scaled_tile_kernel(
            shape_of(64, 64, FLOAT8, block=(32, 32)),
            90,
            name="gemm",
            rows="T",
            tiling=ScaledTiling(16, 64, 32, 1, 4, 2),
        )
