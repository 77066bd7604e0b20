"""GEMMs of few rows against torch in float64, over random shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES
from llmbuild.plugins.kernels.gemm_shape import FLOAT8, FLOATS, GemmShape, SmallKernel, splits_for, step_of
from llmbuild.plugins.kernels.row_gemm import RowTiling, row_kernel
from llmbuild.plugins.kernels.small_gemm import small_gemm
from llmbuild.plugins.kernels.tile_gemm import TileTiling, tile_kernel
from support.gemm_cases import DTYPES, TOLERANCE, assert_near, compute

SMS = [80, 90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (86, 89, 100, 120))]
TILE = TileTiling(16, 16, 16, 1, 4, 3)


def operands(shape: GemmShape, rows: int, sm: int, seed: int) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    """Return x, what else the kernel takes, and the result in float64."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[shape.dtype]
    x = torch.randn(rows, shape.k, generator=generator).to(torch.float8_e4m3fn if shape.x_dtype else dtype)
    w = torch.randn(shape.n, shape.k, generator=generator).to(torch.float8_e4m3fn if shape.w_dtype else dtype)
    result = x.double() @ w.double().T
    bits = torch.uint8 if sm < 89 else torch.float8_e4m3fn
    weights: dict[str, Any] = {"w": w.view(bits) if shape.w_dtype else w}
    if shape.w_dtype:
        weights["w_scale"] = torch.rand(shape.n, generator=generator) + 0.1
        result = result * weights["w_scale"].double()
    if shape.x_dtype:
        weights["x_scale"] = torch.rand(rows, generator=generator) + 0.1
        result = result * weights["x_scale"].double()[:, None]
    if shape.bias:
        weights["bias"] = torch.randn(shape.n, generator=generator).to(dtype)
        result = result + weights["bias"].double()
    return x.view(bits) if shape.x_dtype else x, weights, result


def check(kernel: SmallKernel, shape: GemmShape, rows: int, sm: int = 90, seed: int = 0) -> None:
    x, weights, expected = operands(shape, rows, sm, seed)
    actual = compute(kernel, x, shape.n, DTYPES[shape.dtype], **weights)
    assert_near(actual, expected, TOLERANCE[shape.dtype])


shapes = st.builds(
    GemmShape, n=st.integers(1, 70), k=st.integers(1, 90), dtype=st.sampled_from(sorted(FLOATS)), bias=st.booleans()
)


@settings(max_examples=25, deadline=None)
@given(shape=shapes, block_n=st.sampled_from([1, 2, 16]), block_k=st.sampled_from([16, 64]), seed=st.integers(0, 99))
def test_one_row(shape, block_n, block_k, seed) -> None:
    check(row_kernel(shape, 90, name="gemm", tiling=RowTiling(block_n, block_k, 1)), shape, 1, seed=seed)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    rows=st.integers(1, 16),
    block_n=st.sampled_from([16, 32]),
    block_k=st.sampled_from([16, 32]),
    splits=st.sampled_from([1, 2, 4]),
    swap=st.booleans(),
    pdl=st.booleans(),
    seed=st.integers(0, 99),
)
def test_few_rows(shape, rows, block_n, block_k, splits, swap, pdl, seed) -> None:
    pdl = pdl and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0))
    tiling = TileTiling(16, block_n, block_k, splits, 4, 2, swap)
    check(tile_kernel(shape, 90, name="gemm", tiling=tiling, pdl=pdl), shape, rows, seed=seed)


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_that_are_built_in(dtype: str, rows: int) -> None:
    shape = GemmShape(96, 320, dtype, bias=True)
    kernels = [row_kernel(shape, 90, name="one"), *(tile_kernel(shape, 90, name="few", most_rows=m) for m in (16, 64))]
    check(next(kernel for kernel in kernels if rows <= (kernel.most_rows or rows)), shape, rows)


def test_which_kernels_few_rows_have() -> None:
    def rows(shape: GemmShape, sm: int) -> list[int | None]:
        return [kernel.most_rows for kernel in small_gemm(shape, sm, name="gemm")]

    assert rows(GemmShape(96, 320), 90) == [1, 16, 32]
    assert rows(GemmShape(96, 384, w_dtype=FLOAT8, x_dtype=FLOAT8), 90) == [1, 16, 32]
    assert rows(GemmShape(96, 320), 80) == rows(GemmShape(96, 320, "float32"), 90) == [1]


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("x_dtype", [None, FLOAT8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float8_weights_with_a_scale_for_each_row(dtype: str, x_dtype: str | None, sm: int) -> None:
    shape = GemmShape(40, 72, dtype, bias=True, w_dtype=FLOAT8, x_dtype=x_dtype)
    if torch.cuda.is_available() and sm >= 89 > 10 * torch.cuda.get_device_capability()[0]:
        pytest.skip("needs a GPU that has float8")
    check(row_kernel(shape, sm, name="gemm", tiling=RowTiling(2, 64, 1)), shape, 1, sm)
    for splits in (1, 2):
        tiling = TileTiling(16, 16, 32, splits, 4, 2)
        check(tile_kernel(shape, sm, name="gemm", tiling=tiling), shape, 5, sm)


def test_split_sums_are_the_same_each_time() -> None:
    shape = GemmShape(48, 256, "bfloat16")
    x, weights, _ = operands(shape, 7, 90, 1)
    kernel = tile_kernel(shape, 90, name="gemm", tiling=TileTiling(16, 16, 32, 4, 4, 3))
    first, second = (compute(kernel, x, shape.n, torch.bfloat16, **weights) for _ in range(2))
    assert torch.equal(first, second)
    alone = compute(kernel, x[3:4], shape.n, torch.bfloat16, **weights)  # nor do they depend on the other rows
    assert torch.equal(alone[0], first[3])


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("shape", [GemmShape(4096, 4096), GemmShape(6144, 4096, w_dtype=FLOAT8)], ids=str)
def test_it_compiles(shape: GemmShape, sm: int) -> None:
    one, few = row_kernel(shape, sm, name="one", pdl=sm >= 90), tile_kernel(shape, sm, name="few", pdl=sm >= 90)
    assert (len(few.specs) == 2) == ("partial" in few.workspaces)
    for spec in (*one.specs, *few.specs):
        assert compile_spec(spec, sm).launch.shared <= SHARED_BYTES[sm] * 1024


@pytest.mark.parametrize("sm", [80, 90])
def test_an_odd_shape_compiles(sm: int) -> None:
    shape = GemmShape(1001, 611, "float16", bias=True)
    for kernel in (
        row_kernel(shape, sm, name="one"),
        *(tile_kernel(shape, sm, name="few", most_rows=m) for m in (16, 64)),
    ):
        for spec in kernel.specs:
            assert compile_spec(spec, sm).launch.shared <= SHARED_BYTES[sm] * 1024


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, 100, 120])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("x_dtype", [None, FLOAT8])
def test_every_tiling_compiles(x_dtype: str | None, swap: bool, sm: int) -> None:
    shape = GemmShape(4096, 4096, w_dtype=FLOAT8, x_dtype=x_dtype)
    for tiling in (TileTiling(16, 64, 128, 1, 4, 4, swap), TileTiling(64, 64, 128, 2, 4, 3, swap)):
        for spec in tile_kernel(shape, sm, name="gemm", most_rows=tiling.block_m, tiling=tiling).specs:
            compile_spec(spec, sm)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "is not positive"),
        ({"dtype": "int8"}, "dtype 'int8' is none of float32"),
        ({"x_dtype": FLOAT8}, "no GEMM of float8_e4m3fn rows and None weights"),
        ({"w_dtype": "int8"}, "no GEMM of None rows and int8 weights"),
    ],
)
def test_refused_shapes(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GemmShape(**{"n": 16, "k": 16} | fields)


@pytest.mark.parametrize(("k", "step"), [(4096, 128), (576, 64), (96, 32), (611, 128), (20, 32), (8, 16), (14336, 128)])
def test_steps_over_k(k: int, step: int) -> None:
    assert step_of(k, 128) == step


@pytest.mark.parametrize(
    ("programs", "steps", "row_bytes", "rows", "splits"),
    [
        (128, 32, 8192, 16, 4),
        (192, 32, 8192, 16, 2),
        (896, 32, 8192, 16, 1),  # processors enough
        (8, 8, 8192, 16, 1),  # few steps to share
        (64, 64, 8192, 64, 2),  # sums would weigh too much
        (64, 64, 2048, 64, 1),
    ],
)
def test_narrow_layers_are_split(programs: int, steps: int, row_bytes: int, rows: int, splits: int) -> None:
    assert splits_for(programs, steps, row_bytes, rows, 90) == splits
