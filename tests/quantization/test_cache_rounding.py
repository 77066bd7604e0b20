"""Rounding of keys and values to 8 bits: the reference against ml_dtypes, row programs against the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llmbuild.errors import ModelError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.cache_rounding import round_fp8, round_int8, widened
from llmbuild.plugins.kernels.float8 import float32_to_e4m3
from llmbuild.quantization.cache_scales import checked_scale, fp8_scale
from support.kernels import run

NAN, INF = float("nan"), float("inf")
NUMBERS = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, -0.0, 1e4, -1e4, 448.0, 464.0, 1e-45, 2.0**-10])
ROWS = arrays(np.float32, st.tuples(st.integers(1, 6), st.just(16)), elements=NUMBERS)
SCALES = st.floats(2.0**-20, 2.0**10, width=32)


@triton.jit
def encode(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, float32_to_e4m3(tl.load(x + i)))


@given(ROWS, SCALES)
@settings(max_examples=200, deadline=None)
def test_fp8_is_what_ml_dtypes_rounds_to(x: np.ndarray, scale: float) -> None:
    quotient = np.clip(x / np.float32(scale), -448, 448)
    expected = quotient.astype(ml_dtypes.float8_e4m3fn)
    found = round_fp8(torch.from_numpy(x), torch.tensor([scale]))
    np.testing.assert_array_equal(found.numpy(), expected.view(np.uint8))
    back = widened(found, torch.tensor([scale])).numpy()
    np.testing.assert_array_equal(back, expected.astype(np.float32) * np.float32(scale))
    assert np.isfinite(back).all()


@given(arrays(np.float32, 64, elements=st.floats(width=32)))
@settings(max_examples=20, deadline=None)
def test_kernels_round_to_the_same_bits(x: np.ndarray) -> None:
    """Every float32, NaN and infinities included."""
    values = torch.from_numpy(x)
    found = torch.zeros(64, dtype=torch.uint8)
    run(encode, (1,), values, found, BLOCK=64)
    expected = round_fp8(values, torch.ones(1))
    numbers = ~values.isnan()
    assert torch.equal(found[numbers], expected[numbers])
    assert bool((found[~numbers] & 0x7F == 0x7F).all()) and bool((expected[~numbers] & 0x7F == 0x7F).all())


@given(ROWS)
@settings(max_examples=200, deadline=None)
def test_int8_is_off_by_half_a_step_at_most(x: np.ndarray) -> None:
    numbers, scale = round_int8(torch.from_numpy(x))
    assert numbers.dtype == torch.int8 and int(numbers.min()) >= -127
    largest = np.abs(x).max(-1, keepdims=True)
    np.testing.assert_array_equal(scale.numpy(), largest / np.float32(127))
    error = np.abs(widened(numbers, scale).numpy() - x)
    normal = largest > 1e-35  # below, a scale has few bits itself
    assert (error <= np.where(normal, largest / 254 * (1 + 1e-5), largest)).all()
    assert np.array_equal(numbers.numpy().astype(np.float32), np.rint(numbers.numpy()))


def test_int8_of_special_rows() -> None:
    x = torch.tensor([[0.0, -0.0, 0.0], [-2.5, -2.5, -2.5], [1e4, 1e-3, -39.4], [NAN, 1.0, 2.0], [INF, 1.0, 2.0]])
    numbers, scale = round_int8(x)
    assert numbers.tolist() == [[0, 0, 0], [-127, -127, -127], [127, 0, -1], [0, 0, 0], [0, 0, 0]]
    assert scale[:2, 0].tolist() == [0.0, pytest.approx(2.5 / 127)] and scale[3:, 0].tolist() == [INF, INF]
    wide = widened(numbers, scale)
    assert wide[:3].isfinite().all() and wide[3:].isnan().all()  # what was no number is not hidden


def test_fp8_of_special_values() -> None:
    found = widened(round_fp8(torch.tensor([0.0, -0.0, 1e4, -1e4, INF, NAN]), torch.tensor([0.5])), torch.tensor([0.5]))
    assert found[:5].tolist() == [0.0, -0.0, 224.0, -224.0, 224.0] and bool(found[5].isnan())


@pytest.mark.parametrize("absmax", [1e-30, 0.3, 7.0, 1e4])
def test_calibrated_scales_leave_room(absmax: float) -> None:
    scale = torch.tensor([fp8_scale(absmax)])
    twice = torch.tensor([2 * absmax])
    assert float(widened(round_fp8(twice, scale), scale)) == pytest.approx(2 * absmax, rel=1e-6)
    x = torch.linspace(0.01, 1, 100) * absmax
    relative = (widened(round_fp8(x, scale), scale) / x - 1).abs().max()
    assert float(relative) <= 2**-4


def test_keys_that_were_all_zero_have_a_scale() -> None:
    assert fp8_scale(0.0) == 1.0


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF])
def test_stored_scales_that_are_none_are_refused_by_name(value: float) -> None:
    with pytest.raises(ModelError, match=r"tensor 'layers.0.k_scale' holds .* no scale of a KV cache"):
        checked_scale(value, "layers.0.k_scale")


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_oracle_attends_over_what_the_cache_holds(kind: str) -> None:
    """A step's own keys are read back rounded too, as kernels do."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, 8, generator=draw) for heads in (4, 2, 2))
    scales = [torch.tensor([0.01]), torch.tensor([0.02])]
    if kind == "fp8":
        stored = [round_fp8(x, s) for x, s in zip((k, v), scales, strict=True)]
    else:
        stored, scales = (list(pair) for pair in zip(*(round_int8(x) for x in (k, v)), strict=True))
    plain, rounded = PagedState(2, 4), PagedState(2, 4)
    for state in (plain, rounded):
        table = torch.tensor([[1]], dtype=torch.int32)
        state.set_step(torch.tensor([4, 5, 6]), table, torch.tensor([3]), torch.tensor([0, 3]))
    wide = [widened(x, s) for x, s in zip(stored, scales, strict=True)]
    expected = plain.attend(q, *wide, 0, 0.3)
    found = rounded.attend(q, *stored, 0, 0.3, k_scale=scales[0], v_scale=scales[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found, plain.attend(q, k, v, 0, 0.3))
