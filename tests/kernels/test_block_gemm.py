"""Block-quantized products and lookups against the definition of `llmbuild::linear_blockwise`, over random blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES
from llmbuild.plugins.kernels.block_few_gemm import BlockFewTiling, block_few_kernel, reads_few
from llmbuild.plugins.kernels.block_gemm import block_gemm
from llmbuild.plugins.kernels.block_layout import BlockShape, pack_int4, pack_int8
from llmbuild.plugins.kernels.block_row_gemm import BlockRowTiling, block_row_kernel
from llmbuild.plugins.kernels.block_tile_gemm import BlockTileTiling, block_tile_kernel
from llmbuild.plugins.kernels.block_widen import widen_halves
from llmbuild.plugins.kernels.embedding_blockwise import embedding_blockwise_spec
from llmbuild.plugins.kernels.gemm_shape import FLOAT8, FLOATS, GemmShape, SmallKernel
from support.gemm_cases import DTYPES, TOLERANCE, assert_near, block_weight, compute, launch
from support.kernels import run

GPTQ, Q4_1, PER_ROW = BlockShape(4, 128, 8), BlockShape(4, 32, 0, True), BlockShape(8, 4096, 128)
HALVES = BlockShape(4, 48, 3, True)  # the halves of some units are of different blocks


def check(kernel: SmallKernel, shape: GemmShape, block: BlockShape, rows: int, seed: int = 0) -> None:
    arguments, dense = block_weight(shape.n, shape.k, block, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, shape.k, generator=generator).to(DTYPES[shape.dtype])
    expected = x.double() @ dense.double().T
    if shape.bias:
        arguments["bias"] = torch.randn(shape.n, generator=generator).to(x.dtype)
        expected += arguments["bias"].double()
    # Tiles multiply weights rounded to x's dtype; before, a weight is the difference of two numbers that may be larger.
    room = torch.finfo(x.dtype).eps / 2 * (x.double().abs() @ dense.double().abs().T).max().item()
    larger = (2**block.bits + block.zero) * arguments["w_scale"].abs().max().item()
    room += torch.finfo(torch.float32).eps * larger * x.double().abs().sum(1).max().item()
    assert_near(compute(kernel, x, shape.n, x.dtype, **arguments), expected, TOLERANCE[shape.dtype], room)


shapes = st.builds(
    GemmShape, n=st.integers(1, 40), k=st.integers(1, 140), dtype=st.sampled_from(sorted(FLOATS)), bias=st.booleans()
)
blocks = st.builds(
    BlockShape,
    bits=st.sampled_from([8, 4]),
    block_size=st.sampled_from([16, 32, 48, 64, 128, 200]),
    zero=st.integers(0, 15),
    has_offset=st.booleans(),
    scale_dtype=st.sampled_from(sorted(FLOATS)),
)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes, block=blocks, block_n=st.sampled_from([4, 16]), units=st.sampled_from([1, 4]), seed=st.integers(0, 9)
)
def test_one_row(shape, block, block_n, units, seed) -> None:
    kernel = block_row_kernel(shape, block, name="gemm", tiling=BlockRowTiling(block_n, units, 1))
    check(kernel, shape, block, 1, seed)


@settings(max_examples=50, deadline=None)
@given(
    shape=shapes,
    block=blocks,
    rows=st.integers(1, 16),
    units=st.sampled_from([1, 2, 4]),
    splits=st.sampled_from([1, 2, 4]),
    swap=st.booleans(),
    pdl=st.booleans(),
    seed=st.integers(0, 9),
)
def test_few_rows(shape, block, rows, units, splits, swap, pdl, seed) -> None:
    pdl = pdl and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0))
    tiling = BlockTileTiling(16, 16, units, splits, 4, 2, swap)
    kernel = block_tile_kernel(shape, block, 90, name="gemm", most_rows=16, tiling=tiling, pdl=pdl)
    check(kernel, shape, block, rows, seed)


@settings(max_examples=15, deadline=None)
@given(shape=shapes, block=blocks, rows=st.integers(1, 50), swap=st.booleans(), seed=st.integers(0, 9))
def test_any_number_of_rows(shape, block, rows, swap, seed) -> None:
    tiling = BlockTileTiling(16, 32, 2, 1, 4, 2, swap)
    kernel = block_tile_kernel(shape, block, 90, name="gemm", most_rows=None, tiling=tiling)
    check(kernel, shape, block, rows, seed)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 600),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    bias=st.booleans(),
    block=st.builds(
        BlockShape,
        bits=st.just(4),
        block_size=st.sampled_from([128, 256, 600]),
        zero=st.integers(0, 15),
        has_offset=st.booleans(),
        scale_dtype=st.sampled_from(sorted(FLOATS)),
    ),
    most_rows=st.sampled_from([8, 16]),
    tiling=st.sampled_from([BlockFewTiling(16, 1, 1), BlockFewTiling(16, 2, 2), BlockFewTiling(32, 4, 4)]),
    pdl=st.booleans(),
    seed=st.integers(0, 9),
)
def test_products_of_blocks(n, k, dtype, bias, block, most_rows, tiling, pdl, seed) -> None:
    pdl = pdl and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0))
    shape = GemmShape(n, k, dtype, bias)
    assert reads_few(shape, block)
    kernel = block_few_kernel(shape, block, 90, name="gemm", most_rows=most_rows, tiling=tiling, pdl=pdl)
    for rows in (1, most_rows - 3):
        check(kernel, shape, block, rows, seed)


@triton.jit
def widen_all(units, low, high, ZERO: tl.constexpr):
    places = tl.arange(0, 256)
    low_values, high_values = widen_halves(tl.load(units + places), ZERO, low.dtype.element_ty)
    tl.store(low + places, low_values)
    tl.store(high + places, high_values)


@pytest.mark.parametrize("zero", range(16))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_byte_widens_exactly(dtype: torch.dtype, zero: int) -> None:
    units = torch.arange(256, dtype=torch.uint8)
    low, high = torch.zeros(256, dtype=dtype), torch.zeros(256, dtype=dtype)
    run(widen_all, (1,), units, low, high, ZERO=zero)
    assert torch.equal(low.float(), (units & 15).float() - zero)
    assert torch.equal(high.float(), (units >> 4).float() - zero)


def test_sums_of_a_block_are_exact_where_float32_holds_them() -> None:
    shape, block = GemmShape(16, 512, "float16"), BlockShape(4, 128, 8)
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (16, 512), generator=generator, dtype=torch.uint8)
    x = torch.randint(-2, 3, (3, 512), generator=generator).half()
    scale = torch.full((16, 4), 0.25)
    kernel = block_few_kernel(shape, block, 90, name="gemm", most_rows=8)
    out = compute(kernel, x, 16, x.dtype, w=torch.from_numpy(pack_int4(q.numpy())), w_scale=scale)
    assert torch.equal(out, (x.float() @ (q.float() - 8).T / 4).half())


@pytest.mark.parametrize("rows", [1, 5, 64, 130])
@pytest.mark.parametrize("block", [Q4_1, GPTQ, PER_ROW, HALVES], ids=str)
def test_the_kernels_that_are_built_in(block: BlockShape, rows: int) -> None:
    shape = GemmShape(80, 288, bias=True)
    kernels = block_gemm(shape, block, 90, name="gemm")
    assert [kernel.most_rows for kernel in kernels] == [8 if block == GPTQ else 1, 16, 64, None]
    check(next(kernel for kernel in kernels if rows <= (kernel.most_rows or rows)), shape, block, rows)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 4),
    k=st.integers(1, 140),
    block=blocks,
    dtype=st.sampled_from(sorted(FLOATS)),
    seed=st.integers(0, 9),
)
def test_rows_of_a_table(tokens, k, block, dtype, seed) -> None:
    arguments, dense = block_weight(11, k, block, seed)
    ids = torch.randint(0, 11, (tokens,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    out = torch.full((tokens, k), float("nan"), dtype=DTYPES[dtype])
    spec = embedding_blockwise_spec("embedding", block, k=k, dtype=dtype)
    launch(spec, arguments | {"ids": ids, "out": out}, {"T": tokens})
    expected = dense[ids.long()].to(out.dtype)
    if torch.cuda.is_available():  # a product and a sum are rounded once there
        torch.testing.assert_close(out, expected)
    else:
        assert torch.equal(out, expected)


def test_units_of_4_bits_hold_the_second_sixteen_in_their_high_halves() -> None:
    q = np.arange(80, dtype=np.uint8).reshape(2, 40) % 16
    packed = pack_int4(q)
    assert packed.shape == (2, 32)
    assert np.array_equal(packed[:, :16] & 15, q[:, :16])
    assert np.array_equal(packed[:, :16] >> 4, q[:, 16:32])
    assert np.array_equal(packed[:, 16:24] & 15, q[:, 32:])
    assert not (packed[:, 16:] >> 4).any() and not packed[:, 24:].any()


def test_units_of_8_bits_are_padded() -> None:
    q = np.arange(40, dtype=np.uint8).reshape(2, 20)
    packed = pack_int8(q)
    assert packed.shape == (2, 32)
    assert np.array_equal(packed[:, :20], q) and not packed[:, 20:].any()


def specs_of(block: BlockShape, sm: int, dtype: str = "bfloat16") -> list[Any]:
    shape = GemmShape(4096, 4096, dtype)
    specs = [spec for kernel in block_gemm(shape, block, sm, name="gemm", pdl=sm >= 90) for spec in kernel.specs]
    return [*specs, embedding_blockwise_spec("embedding", block, k=4096, dtype=dtype, pdl=sm >= 90)]


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("block", [Q4_1, GPTQ, PER_ROW], ids=str)
def test_it_compiles(block: BlockShape, sm: int) -> None:
    for spec in specs_of(block, sm):
        assert compile_spec(spec, sm).launch.shared <= SHARED_BYTES[sm] * 1024, spec.name


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("block", [replace(Q4_1, block_size=16), GPTQ, replace(PER_ROW, block_size=64)], ids=str)
def test_every_block_compiles_and_fits(block: BlockShape, sm: int) -> None:
    for spec in specs_of(block, sm, "float16"):
        assert compile_spec(spec, sm).launch.shared <= SHARED_BYTES[sm] * 1024, spec.name


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 86, 90])
def test_float32_compiles_and_fits(sm: int) -> None:
    for spec in specs_of(GPTQ, sm, "float32"):
        assert compile_spec(spec, sm).launch.shared <= SHARED_BYTES[sm] * 1024, spec.name


def test_refused_blocks() -> None:
    with pytest.raises(ValueError, match="5 bits; kernels read 8 or 4"):
        BlockShape(5, 32, 0)
    with pytest.raises(ValueError, match="blocks of 32 columns with 16 as zero"):
        BlockShape(4, 32, 16)
    with pytest.raises(ValueError, match="scales of 'int8', which is none of float32"):
        BlockShape(4, 32, 0, scale_dtype="int8")
    with pytest.raises(ValueError, match="blocks of 24 columns; kernels read multiples of 16"):
        block_gemm(GemmShape(16, 48), BlockShape(4, 24, 0), 90, name="gemm")
    with pytest.raises(ValueError, match="blocks of integers, yet weights of float8_e4m3fn"):
        block_gemm(GemmShape(16, 48, w_dtype=FLOAT8), GPTQ, 90, name="gemm")
    with pytest.raises(ValueError, match="dtype 'int8' is none of float32"):
        embedding_blockwise_spec("embedding", GPTQ, k=64, dtype="int8")
