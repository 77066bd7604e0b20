"""GPTQ against rounding to nearest: better on correlated inputs, the same where nothing can be made up for."""

from __future__ import annotations

import pytest
import torch

from llmbuild.errors import ConfigError, ModelError
from llmbuild.quantization.blocks import BlockTensor
from llmbuild.quantization.gptq import columns_at_once, factor, gptq_format, output_error, round_rows
from llmbuild.quantization.primitives import quantize_blocks
from llmbuild.quantization.recipes import Gptq, PerChannel, PerGroup, WeightOnly

SCHEMES = [
    Gptq(WeightOnly(4, PerGroup(128))),
    Gptq(WeightOnly(4, PerGroup(32), symmetric=False)),
    Gptq(WeightOnly(3, PerGroup(48))),
    Gptq(WeightOnly(4, PerGroup(192))),
    Gptq(WeightOnly(4, PerChannel())),
    Gptq(WeightOnly(4, PerGroup(64)), act_order=True),
]
COLUMNS = 300


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(columns: int = COLUMNS, rows: int = 500) -> torch.Tensor:
    """XᵀX of inputs that are mixtures of few directions, with channels of very different size."""
    x = random(rows, 20, seed=1) @ random(20, columns, seed=2) + 0.3 * random(rows, columns, seed=3)
    x = x * torch.linspace(0.1, 3, columns)
    return x.T @ x


def rounded(weight: torch.Tensor, scheme: Gptq, gram: torch.Tensor) -> BlockTensor:
    return round_rows(weight, scheme, factor(gram, scheme, name="x"), name="w")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_outputs_are_closer_than_those_of_rounding_to_nearest(scheme: Gptq) -> None:
    weight, gram = random(24, COLUMNS, seed=4), correlated()
    nearest = quantize_blocks(weight, scheme.rounding, name="w")
    found = rounded(weight, scheme, gram)
    assert output_error(weight, found, gram) < 0.7 * output_error(weight, nearest, gram)
    assert found.format == gptq_format(scheme, COLUMNS) and found.format.bits == scheme.rounding.bits
    assert int(found.q.max()) < 2**scheme.rounding.bits
    assert found.scale.shape == nearest.scale.shape and (found.offset is None) == scheme.rounding.symmetric


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("diagonal", [torch.linspace(0.0, 9.0, COLUMNS), torch.zeros(COLUMNS)], ids=["some", "zero"])
def test_inputs_that_are_not_correlated_leave_rounding_to_nearest(scheme: Gptq, diagonal: torch.Tensor) -> None:
    weight = random(5, COLUMNS, seed=5)
    nearest, found = quantize_blocks(weight, scheme.rounding, name="w"), rounded(weight, scheme, diagonal.diag())
    assert found.q.equal(nearest.q) and found.scale.equal(nearest.scale)
    assert (found.offset is None) or (nearest.offset is not None and found.offset.equal(nearest.offset))


def test_columns_in_blocks_give_what_the_formula_gives_column_by_column() -> None:
    """Equation 3 of the paper in float64, without blocks: w_k -= (w_j - ŵ_j)·U_jk / U_jj for all k > j."""
    scheme = Gptq(WeightOnly(4, PerGroup(64)))
    weight, gram = random(6, COLUMNS, seed=6), correlated()
    damped = gram.double() + 0.01 * gram.diagonal().double().mean() * torch.eye(COLUMNS, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    left, levels = weight.double(), torch.empty(6, COLUMNS)
    for column in range(COLUMNS):
        if column % 64 == 0:
            scale = left[:, column : column + 64].abs().amax(1) / 7
        levels[:, column] = (left[:, column] / scale).round().clamp(-8, 7)
        error = (left[:, column] - levels[:, column] * scale) / upper[column, column]
        left[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
    found = rounded(weight, scheme, gram)
    assert float((found.q.double() - 8 == levels).double().mean()) > 0.995  # float32 decides a near tie otherwise


def test_rows_are_independent() -> None:
    weight, gram, scheme = random(9, COLUMNS, seed=7), correlated(), SCHEMES[0]
    found = factor(gram, scheme, name="x")
    whole = round_rows(weight, scheme, found, name="w")
    parts = [round_rows(part, scheme, found, name="w") for part in weight.split(4)]
    same = torch.cat([part.q for part in parts]) == whole.q
    assert float(same.float().mean()) > 0.999  # a product of other shape may round its last bit differently
    assert rounded(weight, scheme, gram).q.equal(whole.q)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zero_rows_and_constant_rows_and_outliers_stay_finite(scheme: Gptq) -> None:
    weight = random(4, COLUMNS, seed=8)
    weight[0] = 0
    weight[1] = 0.25
    weight[2, 17] = 1e4
    back = rounded(weight, scheme, correlated()).dequantize()
    assert bool(torch.isfinite(back).all())
    assert not back[0].any()


def test_what_cannot_be_rounded_is_refused_by_name() -> None:
    weight = random(2, COLUMNS, seed=9)
    weight[1, 3] = float("nan")
    with pytest.raises(ModelError, match=r"weight 'w' holds nan(.|\n)*row 1, column 3"):
        rounded(weight, SCHEMES[0], correlated())
    with pytest.raises(ModelError, match="the Gram matrix of the input of 'x' has no Cholesky factor"):
        factor(torch.tensor([[1.0, 9.0], [9.0, 1.0]]), SCHEMES[0], name="x")
    with pytest.raises(ConfigError, match="a damping above 0, not 0"):
        Gptq(WeightOnly(4, PerGroup(128)), damping=0)


@pytest.mark.parametrize("size", [1, 16, 48, 100, 128, 192, 256, 300, 1000])
def test_no_group_begins_inside_of_a_block_that_it_reaches_beyond(size: int) -> None:
    width = columns_at_once(size, COLUMNS)
    for begin in range(0, COLUMNS, size):
        end_of_block = (begin // width + 1) * width
        assert begin == 0 or begin % width == 0 or min(begin + size, COLUMNS) <= end_of_block
