"""The interpreter computes what a GPU would, refuses what it cannot, and leaves Triton as it was."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from llmbuild.plugins.kernels.interpreter import KernelError, interpret


@triton.jit
def convert(source, target, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < n).to(tl.float32)
    tl.store(target + i, x.to(target.dtype.element_ty), mask=i < n)


@triton.jit
def product(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    tl.store(c + square, tl.dot(tl.load(a + square), tl.load(b + square)))


@triton.jit
def twice(x):
    return x + x


@triton.jit
def library(x, y, rows, scale, N: tl.constexpr):
    """Helpers, functions and methods of Triton's library, scalars, loops and conditions."""
    i = tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for row in range(rows):
        value = tl.load(x + row * N + i)
        if row % 2 == 0:
            total += twice(value) * scale
        else:
            total += tl.softmax(value) + value.max() + tl.cdiv(rows, 2)
    tl.store(y + i, total - tl.sum(total, axis=0))


@triton.jit
def plus_one(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) + 1.0)


@triton.jit
def add_up(x, y, N: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, N)), axis=0))


@triton.jit
def programs(y):
    x, row, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(y + (plane * tl.num_programs(1) + row) * tl.num_programs(0) + x, 100 * plane + 10 * row + x)


@triton.jit
def dependent(x, y):
    tl.extra.cuda.gdc_wait()
    tl.store(y, tl.load(x))
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def tile(x, y, row, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i[:, None] * N + i[None, :], x.load([row, 0]))


@triton.jit
def own_descriptor_tile(x, y, row, rows, N: tl.constexpr):
    i = tl.arange(0, N)
    descriptor = tl.make_tensor_descriptor(x, [rows, N], [N, 1], [N, N])
    tl.store(y + i[:, None] * N + i[None, :], descriptor.load([row, 0]))


@pytest.fixture
def some_floats() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=generator) * torch.logspace(-30, 30, 500)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.38e38, float("inf"), float("-inf"), 0.0, -0.0, 1e-40])
    return torch.cat((x, ties))


def test_bfloat16_rounds_to_nearest_even(some_floats: torch.Tensor) -> None:
    y = torch.zeros(some_floats.numel(), dtype=torch.bfloat16)
    interpret(convert)[(2,)](some_floats, y, y.numel(), BLOCK=256)
    expected = some_floats.bfloat16()
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16))
    back = torch.zeros_like(some_floats)
    interpret(convert)[(2,)](expected, back, y.numel(), BLOCK=256)
    assert torch.equal(back, expected.float())


def test_nan_stays_nan() -> None:
    y = torch.zeros(1, dtype=torch.bfloat16)
    interpret(convert)[(1,)](torch.tensor([float("nan")]), y, 1, BLOCK=1)
    assert y.isnan().all()


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_float8_rounds_to_nearest_even_and_saturates(dtype: torch.dtype, largest: float) -> None:
    half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = half[half.isfinite()].float()
    y = torch.zeros(x.numel(), dtype=dtype)
    interpret(convert)[(1,)](x, y, x.numel(), BLOCK=2**16)
    assert torch.equal(y.float(), x.clamp(-largest, largest).to(dtype).float())
    back = torch.zeros(x.numel())
    interpret(convert)[(1,)](y, back, x.numel(), BLOCK=2**16)
    assert torch.equal(back, y.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_those_of_the_values(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    c = torch.zeros(16, 16)
    interpret(product)[(1,)](a, b, c, N=16)
    torch.testing.assert_close(c, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def test_helpers_and_the_library() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    y = torch.zeros(8)
    interpret(library)[(1,)](x, y, 3, 0.5, N=8)
    total = x[0] + x[2] + x[1].softmax(0) + x[1].max() + 2
    torch.testing.assert_close(y, total - total.sum())


@pytest.mark.parametrize("kernel", [plus_one, add_up])
def test_arithmetic_on_bfloat16_is_refused(kernel: triton.JITFunction) -> None:
    x = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(
        KernelError, match=rf"{kernel.fn.__name__}, program \(0, 0, 0\) of \(1, 1, 1\).*cast to float32 first"
    ):
        interpret(kernel)[(1,)](x, x.clone(), N=4)


def test_a_store_outside_is_an_error() -> None:
    x, y = torch.ones(8), torch.zeros(4)
    with pytest.raises(KernelError, match="a store of 4 bytes outside all tensors; nearest: byte 16 in one of 16"):
        interpret(plus_one)[(1,)](x, y, N=8)
    assert torch.equal(y, torch.zeros(4))  # nothing of the store was done


def test_a_load_outside_is_an_error_and_a_masked_one_is_not() -> None:
    x, y = torch.ones(6), torch.zeros(6)
    with pytest.raises(KernelError, match="a load of 4 bytes outside"):
        interpret(plus_one)[(1,)](x, torch.zeros(8), N=8)
    interpret(convert)[(1,)](x, y, 6, BLOCK=8)
    assert torch.equal(y, x)


def test_all_programs_of_the_grid_run() -> None:
    y = torch.zeros(2, 3, 4, dtype=torch.int32)
    interpret(programs)[(4, 3, 2)](y)
    plane, row, x = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij")
    assert torch.equal(y, (100 * plane + 10 * row + x).int())


@pytest.mark.parametrize("row", [0, 3, 9])
def test_tensor_descriptors_read_zeros_beyond_the_tensor(row: int) -> None:
    x = torch.randn(11, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    expected = torch.cat((x[row : row + 8], torch.zeros(8, 8)))[:8].bfloat16()
    descriptor = TensorDescriptor(x, [11, 8], [8, 1], [8, 8])
    for kernel, source, rows in ((tile, descriptor, []), (own_descriptor_tile, x, [11])):
        y = torch.full((8, 8), 7.0, dtype=torch.bfloat16)
        interpret(kernel)[(1,)](source, y, row, *rows, N=8)
        assert torch.equal(y, expected)
    with pytest.raises(KernelError, match="a load of 2 bytes outside"):
        interpret(own_descriptor_tile)[(1,)](x, y, 9, 12, N=8)  # one row more than there is


def test_numpy_arrays() -> None:
    x = np.linspace(-3, 3, 8, dtype=np.float32)
    y = np.zeros(8, dtype=ml_dtypes.bfloat16)
    interpret(convert)[(1,)](x, y, 8, BLOCK=8)
    assert np.array_equal(y, x.astype(ml_dtypes.bfloat16))


def test_strided_tensors() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    y = torch.zeros(2)
    interpret(convert)[(1,)](wide[1, 2:], y, 2, BLOCK=2)  # the pointer is that of the view's first element
    assert y.tolist() == [6.0, 7.0]
    with pytest.raises(KernelError, match="a load of 4 bytes outside"):
        interpret(convert)[(1,)](wide[1, 2:], torch.zeros(4), 4, BLOCK=4)


def test_programmatic_dependent_launch_does_nothing_here() -> None:
    y = torch.zeros(1)
    interpret(dependent)[(1,)](torch.ones(1), y)
    assert y.item() == 1.0


@triton.jit
def assembly(x, y, TEXT: tl.constexpr):
    addresses = x + tl.arange(0, 4)
    tl.inline_asm_elementwise(TEXT, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(y, 1.0)


def test_a_prefetch_reads_nothing_yet_must_lie_in_a_tensor() -> None:
    text = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    y = torch.zeros(1)
    interpret(assembly)[(1,)](torch.ones(4), y, TEXT=text)
    assert y.item() == 1.0
    with pytest.raises(KernelError, match="a prefetch of 1 bytes outside all tensors"):
        interpret(assembly)[(1,)](torch.ones(3), y, TEXT=text)
    with pytest.raises(KernelError, match=r"inline assembly with sin\.approx\.f32"):
        interpret(assembly)[(1,)](torch.ones(4), y, TEXT="sin.approx.f32 $0, $1;")


def test_compiler_options_are_ignored_and_unknown_names_are_not() -> None:
    x, y = torch.ones(4), torch.zeros(4)
    interpret(plus_one)[(1,)](x, y, N=4, num_warps=8, num_stages=2)
    assert y.tolist() == [2.0] * 4
    with pytest.raises(TypeError, match="plus_one takes no argument M"):
        interpret(plus_one)[(1,)](x, y, N=4, M=3)
    with pytest.raises(TypeError, match="missing"):
        interpret(plus_one)[(1,)](x, N=4)
    with pytest.raises(TypeError, match="complex64"):
        interpret(plus_one)[(1,)](x.to(torch.complex64), y, N=4)


def test_the_language_is_restored() -> None:
    def state() -> list[object]:
        owners = (tl, tl.core, tl.math, tl.tensor, triton.JITFunction)
        return [(name, value) for owner in owners for name, value in sorted(vars(owner).items(), key=lambda i: i[0])]

    before = state()
    interpret(plus_one)[(1,)](torch.ones(4), torch.zeros(4), N=4)
    with pytest.raises(KernelError):
        interpret(plus_one)[(1,)](torch.ones(1), torch.zeros(1), N=4)
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, state(), strict=True))
