"""Weights as 8-bit floats: the same bits as ml_dtypes, pieces, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.ir import Constant
from llmbuild.errors import ConfigError, ModelError
from llmbuild.plugins.scaled_ops import linear_scaled, quantize_rows
from llmbuild.quantization.float8 import Float8Part, InputScale, RoundedFloat8, quantize_float8
from llmbuild.quantization.recipes import Fp8, PerGroup

NUMBERS = st.one_of(
    st.just(0.0),
    st.floats(-10, 10, width=32),
    st.floats(-1e4, 1e4, width=32),
    st.sampled_from([1e4, -1e4, 1e-30, 448.0, 464.0, 1e-45, 3e38]),
)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    values = draw(st.lists(NUMBERS, min_size=rows * columns, max_size=rows * columns))
    matrix = torch.tensor(values, dtype=torch.float32).reshape(rows, columns)
    if draw(st.booleans()):
        matrix[draw(st.integers(0, rows - 1))] = draw(NUMBERS)  # a constant row, of zeros maybe
    return matrix


def expected(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """By ml_dtypes, whose cast rounds to nearest even."""
    return np.clip(values / scale, np.float32(-448), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from([(1, 0), (2, 4), (3, 5), (16, 16)]))
def test_a_weight_is_rounded_as_ml_dtypes_does(weight: torch.Tensor, block: tuple[int, int]) -> None:
    down, across = block[0], block[1] or weight.shape[1]
    found = quantize_float8(weight, (down, across), name="w")
    values = weight.numpy()
    for i in range(found.scale.shape[0]):
        for j in range(found.scale.shape[1]):
            part = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
            largest = np.abs(values[part]).max() / np.float32(448)
            scale = largest if largest >= np.finfo(np.float32).tiny else np.float32(1)
            assert found.scale[i, j].item() == scale
            bits = found.q[part].contiguous().view(torch.uint8).numpy()
            np.testing.assert_array_equal(bits, expected(values[part], scale).view(np.uint8))
    assert torch.isfinite(found.dequantize((down, across))).all()


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from([None, 0.01, 1.0, 30.0]), st.booleans())
def test_rows_are_rounded_as_ml_dtypes_does(x: torch.Tensor, static: float | None, integers: bool) -> None:
    kind, most = (torch.int8, 127) if integers else (torch.float8_e4m3fn, 448)
    q, scale = quantize_rows(x, None if static is None else torch.tensor([static]), kind)
    values, one = x.numpy(), np.float32(1)
    found = np.abs(values).max(1, keepdims=True) * (one / np.float32(most))
    wanted = np.where(found < np.finfo(np.float32).tiny, one, found) if static is None else np.float32(static)
    np.testing.assert_array_equal(scale.numpy(), np.broadcast_to(wanted, scale.shape))
    with np.errstate(over="ignore"):
        scaled = np.clip(values * (one / wanted), np.float32(-most), np.float32(most))
    numbers = np.rint(scaled).astype(np.int8) if integers else scaled.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(q.view(torch.uint8).numpy(), numbers.view(np.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_with_their_place(bad: float) -> None:
    weight = torch.ones(3, 4)
    weight[2, 1] = bad
    with pytest.raises(ModelError, match=r"'w' holds .*\n.*row 7, column 1"):
        quantize_float8(weight, (1, 4), name="w", first_row=5)


def test_activations_that_are_nan_give_no_finite_product() -> None:
    x, w = torch.ones(2, 4), torch.ones(3, 4)
    x[1, 2] = float("nan")
    for kind in (torch.float8_e4m3fn, torch.int8):
        q, scale = quantize_rows(x, None, kind)
        y = linear_scaled(q, w.to(kind), scale, torch.ones(3, 1), None, [1, 4], torch.float32)
        assert torch.isfinite(y[0]).all() and not torch.isfinite(y[1]).any()


@pytest.mark.parametrize("block", [(1, 12), (4, 4)], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows", [1, 3, 5, 100])
def test_pieces_are_the_rows_of_the_whole(block: tuple[int, int], rows: int) -> None:
    weight = torch.randn(10, 12, generator=torch.Generator().manual_seed(1))
    lazy = RoundedFloat8(Constant(weight), block)
    whole = quantize_float8(weight, block, name="w")
    for part in ("q", "scale"):
        expression, wanted = Float8Part(lazy, part), getattr(whole, part).float()
        found = torch.cat([piece.float() for piece in expression.pieces(rows * 12)])
        assert expression.shape == tuple(wanted.shape) and torch.equal(found, wanted)
        assert torch.equal(expression.load().float(), wanted)
    assert torch.equal(torch.cat(list(lazy.pieces(rows * 12))), whole.dequantize(block))
    assert torch.equal(lazy.load(), whole.dequantize(block))
    assert lazy.held(rows * 12) > 0


def test_the_scale_of_inputs_is_their_largest_magnitude_and_of_zeros_1() -> None:
    class Statistics:
        def __init__(self, *absmax: float) -> None:
            self.values = torch.tensor(absmax)

        def absmax(self, key: str) -> torch.Tensor:
            assert key == "x"
            return self.values

    assert InputScale(Statistics(1.0, 896.0, 3.0), "x").load().tolist() == [2.0]  # type: ignore[arg-type]
    assert InputScale(Statistics(0.0, 0.0), "x").load().tolist() == [1.0]  # type: ignore[arg-type]


def test_other_blocks_than_those_of_products_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 128 channels, not 64"):
        Fp8(PerGroup(64))
