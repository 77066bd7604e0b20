"""Products of few rows on SM 90: how programs share the work, as compiled, and on a GPU against torch in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES
from llmbuild.plugins.kernels.gemm_shape import FLOAT8, GemmShape, SmallKernel
from llmbuild.plugins.kernels.stream_gemm import BLOCK_N, Share, fits, share, stream_kernel
from support.gemm_cases import DTYPES, TOLERANCE, assert_near, compute

BF16 = GemmShape(4096, 4096)
FP8 = GemmShape(4096, 14336, w_dtype=FLOAT8, x_dtype=FLOAT8)


@pytest.mark.parametrize("shape", [BF16, replace(BF16, dtype="float16", bias=True), FP8, replace(FP8, scales=False)])
def test_products_that_it_computes(shape: GemmShape) -> None:
    assert fits(shape, 90)
    assert not fits(shape, 100) and not fits(shape, 80)


@pytest.mark.parametrize(
    "shape",
    [
        replace(BF16, dtype="float32"),
        replace(BF16, k=4100),
        replace(BF16, w_dtype=FLOAT8),
        replace(BF16, w_dtype="int8", x_dtype="int8"),
        replace(FP8, block=(128, 128)),
        replace(FP8, k=4096 + 64),
    ],
)
def test_products_that_it_does_not(shape: GemmShape) -> None:
    assert not fits(shape, 90)


@given(tiles=st.integers(1, 300), steps=st.integers(1, 120), processors=st.integers(1, 132))
def test_programs_share_all_units(tiles: int, steps: int, processors: int) -> None:
    """Each has some; those of one tile are counted; a program has parts of two tiles at most."""
    found = share(tiles, steps, processors)
    units, programs = tiles * steps, found.programs
    bounds = [program * units // programs for program in range(programs + 1)]
    assert 1 <= programs <= processors
    assert all(begin < end for begin, end in itertools.pairwise(bounds))
    owners = [
        [p for p in range(programs) if bounds[p] < (t + 1) * steps and bounds[p + 1] > t * steps] for t in range(tiles)
    ]
    assert max(map(len, owners)) == found.segments
    of_parts = [program for owner in owners if len(owner) > 1 for program in owner]
    assert all(of_parts.count(program) <= 2 for program in set(of_parts))


def test_the_shares_that_were_best_on_a_gpu() -> None:
    """Llama-3-8B in bfloat16 on 132 processors: qkv, o, gate_up, down."""
    shares = [share(n // BLOCK_N, k // 128, 132) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))]
    assert shares == [Share(96, 1), Share(128, 2), Share(128, 2), Share(128, 2)]


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("shape", [BF16, FP8, GemmShape(1000, 192, "float16", bias=True)], ids=str)
def test_it_compiles(shape: GemmShape, rows: int) -> None:
    kernel = stream_kernel(shape, name="gemm", most_rows=rows, pdl=True)
    launch = compile_spec(kernel.specs[0], 90).launch
    assert launch.num_warps == 12 and launch.shared <= SHARED_BYTES[90] * 1024
    assert launch.pdl


@pytest.mark.parametrize("rows", [1, 9, 32])
@pytest.mark.parametrize("shape", [GemmShape(70, 192, bias=True), GemmShape(48, 256, w_dtype=FLOAT8, x_dtype=FLOAT8)])
def test_what_is_interpreted_computes_the_same(shape: GemmShape, rows: int) -> None:
    kernel = stream_kernel(shape, name="gemm", most_rows=32)
    spec = kernel.specs[0].interpreted
    assert spec is not None and set(spec.signature) <= set(kernel.specs[0].signature)
    check(replace(kernel, specs=(spec,)), shape, rows)


@pytest.mark.gpu_sm90
@pytest.mark.parametrize(
    "shape",
    [
        GemmShape(6144, 4096),
        GemmShape(4096, 4096, "float16", bias=True),
        GemmShape(1000, 192, bias=True),
        GemmShape(64, 8192),
        GemmShape(576, 576),
        GemmShape(28672, 4096, w_dtype=FLOAT8, x_dtype=FLOAT8),
        GemmShape(4096, 14336, w_dtype=FLOAT8, x_dtype=FLOAT8),
        GemmShape(592, 512, w_dtype=FLOAT8, x_dtype=FLOAT8, scales=False, bias=True),
    ],
    ids=str,
)
def test_right_on_the_gpu(shape: GemmShape) -> None:
    for most, rows in ((16, 1), (16, 16), (32, 21), (64, 37), (64, 64)):
        kernel = stream_kernel(shape, name="gemm", most_rows=most, pdl=True)
        found = [check(kernel, shape, rows) for _ in range(2)]
        assert torch.equal(*found)


def check(kernel: SmallKernel, shape: GemmShape, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    kind = torch.float8_e4m3fn if shape.x_dtype else DTYPES[shape.dtype]
    x = torch.randn(rows, shape.k, generator=generator).to(kind)
    w = torch.randn(shape.n, shape.k, generator=generator).to(kind)
    expected = x.double() @ w.double().T
    weights = {"w": w}
    if shape.x_dtype and shape.scales:
        weights["w_scale"] = torch.rand(shape.n, generator=generator) + 0.1
        weights["x_scale"] = torch.rand(rows, generator=generator) + 0.1
        expected *= weights["w_scale"].double() * weights["x_scale"].double()[:, None]
    if shape.bias:
        weights["bias"] = torch.randn(shape.n, generator=generator).to(DTYPES[shape.dtype])
        expected += weights["bias"].double()
    actual = compute(kernel, x, shape.n, DTYPES[shape.dtype], **weights)
    assert_near(actual, expected, TOLERANCE[shape.dtype])
    return actual
