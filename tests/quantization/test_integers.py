"""Integers of checkpoints are blocks without any rounding, and are unpacked as they were packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.quantization.integers import Integers, stored_format, unpack, unpack_slice
from support.tiny_quantized import packed


@st.composite
def integers(draw, dtype: torch.dtype = torch.float16) -> Integers:
    bits, rows, groups = draw(st.sampled_from((4, 8))), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    size = draw(st.sampled_from((1, 3, 16, 32)))
    columns = size * groups - draw(st.integers(0, size - 1))  # the last group may be short
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    q = torch.randint(0, 2**bits, (rows, columns), generator=generator).to(torch.uint8)
    exponent = torch.randint(-14, 14, (rows, groups), generator=generator)
    scale = (torch.randn(rows, groups, generator=generator) * 2.0**exponent).to(dtype)
    zero = torch.randint(0, 2**bits, (rows, groups), generator=generator).to(torch.int16)
    return Integers(bits, q, scale, zero if draw(st.booleans()) else None, size)


def form_of(given: Integers):
    zeros = given.zero is not None
    return stored_format(
        given.bits, given.q.shape[1], given.group_size, scale=given.scale.dtype, has_zeros=zeros, source="test"
    )


def expected(given: Integers) -> torch.Tensor:
    """scale·(q - zero) in float64, value by value."""
    zero = torch.full(given.scale.shape, 2 ** (given.bits - 1)) if given.zero is None else given.zero
    out = torch.zeros(given.q.shape, dtype=torch.float64)
    for column in range(out.shape[1]):
        group = column // given.group_size if given.groups is None else int(given.groups[column])
        out[:, column] = given.scale[:, group].double() * (given.q[:, column].double() - zero[:, group].double())
    return out


@settings(max_examples=60, deadline=None)
@given(given=st.one_of(integers(), integers(torch.bfloat16)))
def test_blocks_and_values_are_exact(given: Integers) -> None:
    wanted = expected(given)
    assert torch.equal(given.dequantize().double(), wanted)  # exact in float64, and float32 holds it
    form = form_of(given)
    assert form is not None and form.has_offset == (given.zero is not None)
    blocks = given.to_blocks(form)
    assert blocks.format == form and blocks.scale.shape == (len(given.q), -(-given.q.shape[1] // form.block_size))
    assert torch.equal(blocks.dequantize().double(), wanted)


@settings(max_examples=30, deadline=None)
@given(given=integers(torch.float32))
def test_float32_scales_are_rounded_once_and_in_blocks_without_zero_points_only(given: Integers) -> None:
    assert torch.equal(given.dequantize(), expected(given).float())
    form = form_of(given)
    assert (form is None) == (given.zero is not None)
    if form is not None:
        assert torch.equal(given.to_blocks(form).dequantize(), expected(given).float())


def test_columns_of_a_group_may_lie_anywhere() -> None:
    q = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    given = Integers(4, q, torch.tensor([[0.5, 4.0]]), None, 2, groups=torch.tensor([1, 0, 1, 0]))
    assert given.dequantize().tolist() == [[-28.0, -3.0, -20.0, -2.0]]


@pytest.mark.parametrize(
    ("columns", "group", "size"), [(64, 16, 16), (64, 64, 64), (96, 96, 96), (40, 40, 32), (64, 128, 64)]
)
def test_a_scale_a_row_is_one_block_where_targets_can_cut_it(columns: int, group: int, size: int) -> None:
    form = stored_format(8, columns, group, scale=torch.float32, has_zeros=False, source="test")
    assert form is not None and (form.block_size, form.zero, form.source) == (size, 128, "test")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_unpacking_reverses_packing(bits: int, dim: int) -> None:
    values = torch.randint(0, 2**bits, (24, 40), generator=torch.Generator().manual_seed(bits + dim))
    words = packed(values, bits, dim)
    assert words.dtype is torch.int32 and bool((words < 0).any())  # the sign bit is one of the values'
    assert torch.equal(unpack(words, bits, dim), values.to(torch.uint8))
    for begin, end in ((0, 24), (3, 4), (7, 17), (23, 24)):
        part = unpack_slice(words, bits, dim, begin, end)
        assert torch.equal(part, values.narrow(dim, begin, end - begin).to(torch.uint8))
