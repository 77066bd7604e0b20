"""Round-to-nearest blocks: error bound, invariants of the packed values, and rows that are special."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from llmbuild.errors import ConfigError, ModelError
from llmbuild.plugins.kernels.block_layout import pack_blocks
from llmbuild.quantization.primitives import CHUNK, block_format, quantize_blocks
from llmbuild.quantization.recipes import PerChannel, PerGroup, WeightOnly

SCHEMES = [
    WeightOnly(bits, granularity, symmetric)
    for bits in (2, 4, 8)
    for granularity in (PerGroup(4), PerGroup(32), PerGroup(128), PerChannel())
    for symmetric in (True, False)
]

finite = st.floats(-1e4, 1e4, width=32)
matrices = arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=finite)


def spread(values: torch.Tensor, block_size: int, columns: int) -> torch.Tensor:
    return values.repeat_interleave(block_size, dim=1)[:, :columns]


@settings(max_examples=60, deadline=None)
@given(matrices, st.sampled_from(SCHEMES))
def test_every_value_is_within_half_a_step_and_q_fits_its_bits(values: np.ndarray, scheme: WeightOnly) -> None:
    weight = torch.from_numpy(values)
    blocks = quantize_blocks(weight, scheme, name="w")
    rows, columns = weight.shape
    size = blocks.format.block_size
    assert blocks.format == block_format(scheme, columns) and size <= columns
    assert blocks.q.dtype == torch.uint8 and blocks.q.shape == (rows, columns)
    assert int(blocks.q.max()) < 2**scheme.bits
    assert blocks.scale.shape == (rows, -(-columns // size)) and bool((blocks.scale > 0).all())
    assert (blocks.offset is None) == scheme.symmetric
    back = blocks.dequantize()
    assert bool(torch.isfinite(back).all())
    # half a step, plus what float32 itself rounds away at this magnitude
    bound = (
        spread(blocks.scale, size, columns) * 0.5001 + weight.abs() * 1e-6 + spread(blocks.scale, size, columns) * 1e-4
    )
    assert bool(((back - weight).abs() <= bound + spread_range(weight, size) * 1e-6).all())


def spread_range(weight: torch.Tensor, size: int) -> torch.Tensor:
    """The largest magnitude of each value's block."""
    columns = weight.shape[1]
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % size)).reshape(weight.shape[0], -1, size)
    return spread(padded.amax(-1), size, columns)


@settings(max_examples=30, deadline=None)
@given(matrices, st.sampled_from(SCHEMES))
def test_rows_are_independent_so_merging_rows_changes_nothing(values: np.ndarray, scheme: WeightOnly) -> None:
    weight = torch.from_numpy(values)
    whole = quantize_blocks(torch.cat((weight, weight.flip(0))), scheme, name="w")
    parts = [quantize_blocks(part, scheme, name="w") for part in (weight, weight.flip(0))]
    assert whole.q.equal(torch.cat([part.q for part in parts]))
    assert whole.scale.equal(torch.cat([part.scale for part in parts]))


special = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-38, 1.0, -3.5, 1e4, -1e4])


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 300)), elements=special), st.sampled_from(SCHEMES)
)
def test_zeros_constants_subnormals_and_outliers_stay_finite_and_in_range(
    values: np.ndarray, scheme: WeightOnly
) -> None:
    """float64 as the reference: no value is further away than half a step of its own block."""
    weight = torch.from_numpy(values)
    blocks = quantize_blocks(weight, scheme, name="w")
    size, columns = blocks.format.block_size, weight.shape[1]
    back = blocks.dequantize()
    assert bool(torch.isfinite(back).all())
    step = spread(blocks.scale, size, columns).double()
    usual = spread(blocks.scale, size, columns) != 1  # scale 1 stands for blocks without a range
    error = (back.double() - weight.double()).abs()
    assert bool((error[usual] <= 0.5001 * step[usual] + 1e-6 * spread_range(weight, size)[usual].double()).all())
    assert bool((error[~usual] <= 0.5).all())
    packed = [pack_blocks(blocks.q.numpy(), bits) for bits in (4, 8) if scheme.bits <= bits]
    for units, bits in zip(packed, (bits for bits in (4, 8) if scheme.bits <= bits), strict=True):
        assert (unpacked(units, bits)[:, :columns] == blocks.q.numpy()).all()


def unpacked(units: np.ndarray, bits: int) -> np.ndarray:
    """Values of 16-byte units, in order: what `block_layout` says, one value at a time."""
    rows = []
    for row in units:
        values = []
        for begin in range(0, len(row), 16):
            unit = row[begin : begin + 16].tolist()
            values += [byte & 15 for byte in unit] + [byte >> 4 for byte in unit] if bits == 4 else unit
        rows.append(values)
    return np.array(rows, dtype=np.uint8)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zero_rows_stay_exactly_zero(scheme: WeightOnly) -> None:
    blocks = quantize_blocks(torch.zeros(3, 40), scheme, name="w")
    assert bool((blocks.dequantize() == 0).all()) and bool((blocks.scale == 1).all())


@pytest.mark.parametrize("value", [3.7, -1e-20, 1e4])
def test_constant_rows_are_exact_when_asymmetric_and_near_when_symmetric(value: float) -> None:
    weight = torch.full((2, 16), value)
    assert quantize_blocks(weight, WeightOnly(4, PerGroup(8), symmetric=False), name="w").dequantize().equal(weight)
    back = quantize_blocks(weight, WeightOnly(4, PerGroup(8)), name="w").dequantize()
    torch.testing.assert_close(back, weight, rtol=1e-6, atol=0)


def test_an_outlier_costs_only_its_own_block() -> None:
    weight = torch.linspace(-1, 1, 64).repeat(2, 1)
    clean = quantize_blocks(weight, WeightOnly(4, PerGroup(16)), name="w").dequantize()
    weight[0, 20] = 1e4
    back = quantize_blocks(weight, WeightOnly(4, PerGroup(16)), name="w").dequantize()
    assert back[0, 20] == 1e4
    assert back[0, :16].equal(clean[0, :16]) and back[0, 32:].equal(clean[0, 32:]) and back[1].equal(clean[1])


@pytest.mark.parametrize("tiny", [1e-45, 1e-39, 3e-38])
def test_values_too_small_for_a_scale_become_zero(tiny: float) -> None:
    for symmetric in (True, False):
        weight = torch.tensor([[tiny, -tiny, 0.0, tiny]])
        back = quantize_blocks(weight, WeightOnly(8, PerGroup(4), symmetric), name="w").dequantize()
        assert bool(((back - weight).abs() <= 2 * weight.abs().max()).all())


def test_the_largest_floats_do_not_overflow() -> None:
    weight = torch.tensor([[3.4e38, -3.4e38, 0.0, 1.0]])
    back = quantize_blocks(weight, WeightOnly(8, PerChannel()), name="w").dequantize()
    assert bool(torch.isfinite(back).all()) and float(back[0, 2]) == 0
    with pytest.raises(ModelError, match=r"weight 'w' spans more than float32 can hold(.|\n)*row 0, block 0"):
        quantize_blocks(weight, WeightOnly(8, PerChannel(), symmetric=False), name="w")


@pytest.mark.parametrize(("bad", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_what_is_not_finite_is_refused_by_name_and_place(bad: float, shown: str) -> None:
    weight = torch.zeros(4, 8)
    weight[2, 5] = bad
    with pytest.raises(ModelError) as caught:
        quantize_blocks(weight, WeightOnly(8, PerGroup(4)), name="model.layers.3.mlp.up_proj.weight")
    text = str(caught.value)
    assert f"weight 'model.layers.3.mlp.up_proj.weight' holds {shown} and cannot be quantized" in text
    assert "row 2, column 5" in text and "--quant none" in text


def test_large_matrices_are_done_in_parts_with_the_same_result() -> None:
    columns = 1 << 16
    weight = torch.randn(CHUNK // columns + 3, columns, generator=torch.Generator().manual_seed(0))
    scheme = WeightOnly(4, PerGroup(32))
    whole = quantize_blocks(weight, scheme, name="w")
    last = quantize_blocks(weight[-3:], scheme, name="w")
    assert whole.q[-3:].equal(last.q) and whole.scale[-3:].equal(last.scale)


def test_bfloat16_weights_are_quantized_as_the_floats_they_are() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scheme = WeightOnly(8, PerGroup(32))
    assert quantize_blocks(weight, scheme, name="w").q.equal(quantize_blocks(weight.float(), scheme, name="w").q)


def test_schemes_refuse_nonsense() -> None:
    with pytest.raises(ConfigError, match="takes 2 to 8 bits, not 1"):
        WeightOnly(1, PerChannel())
    with pytest.raises(ConfigError, match="needs at least 1 channel, not 0"):
        WeightOnly(4, PerGroup(0))
