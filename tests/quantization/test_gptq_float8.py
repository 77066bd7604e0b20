"""GPTQ on 8-bit floats against rounding to nearest, and weights of the recipe `fp8-gptq` in a program."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmbuild.builder.accuracy.walk import copy_program
from llmbuild.builder.ir import Constant
from llmbuild.builder.passes.quantize_weights import choose_formats
from llmbuild.errors import ConfigError, ModelError
from llmbuild.quantization.float8 import Float8Matrix, Float8Part, quantize_float8
from llmbuild.quantization.gptq import factor
from llmbuild.quantization.gptq_float8 import CompensatedFloat8, round_float8_rows
from llmbuild.quantization.recipes import Compensation, Fp8, PerGroup, find_recipe
from support.calibrated import KnownRows, before_formats, gathered
from support.traced import traced

COLUMNS = 300
PLAIN, ORDERED = Compensation(), Compensation(act_order=True)
WINDOWS = [np.random.default_rng(7).integers(3, 250, 24).tolist() for _ in range(3)]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(columns: int = COLUMNS) -> torch.Tensor:
    """Mixtures of few directions, with channels of very different size."""
    x = random(500, 20, seed=1) @ random(20, columns, seed=2) + 0.3 * random(500, columns, seed=3)
    return x * torch.linspace(0.1, 3, columns)


class Known(KnownRows):
    def gram(self, key: str) -> torch.Tensor:
        return self.x.T @ self.x


def output_error(weight: torch.Tensor, made: Float8Matrix, gram: torch.Tensor) -> float:
    lost = weight.double() - made.dequantize((1, weight.shape[1])).double()
    return float((lost @ gram.double() * lost).sum())


@pytest.mark.parametrize("how", [PLAIN, ORDERED], ids=["in order", "by size"])
def test_the_outputs_are_closer_than_those_of_rounding_to_nearest(how: Compensation) -> None:
    x, weight = inputs(), random(24, COLUMNS, seed=4)
    gram = x.T @ x
    nearest = quantize_float8(weight, (1, COLUMNS), name="w")
    found = round_float8_rows(weight, factor(gram, how, name="x"), name="w")
    assert output_error(weight, found, gram) < 0.5 * output_error(weight, nearest, gram)
    assert torch.equal(found.scale, nearest.scale)
    assert found.q.dtype == torch.float8_e4m3fn and found.q.float().isfinite().all()


@pytest.mark.parametrize("diagonal", [torch.linspace(0.0, 9.0, COLUMNS), torch.zeros(COLUMNS)], ids=["some", "zero"])
def test_inputs_that_are_not_correlated_leave_rounding_to_nearest(diagonal: torch.Tensor) -> None:
    weight = random(5, COLUMNS, seed=5)
    nearest = quantize_float8(weight, (1, COLUMNS), name="w")
    found = round_float8_rows(weight, factor(diagonal.diag(), PLAIN, name="x"), name="w")
    assert torch.equal(found.q.float(), nearest.q.float())


def test_columns_in_blocks_give_what_the_formula_gives_column_by_column() -> None:
    x, weight = inputs(), random(4, COLUMNS, seed=6)
    found = factor(x.T @ x, PLAIN, name="x")
    scale, left = weight.abs().amax(1) / 448, weight.double()
    wanted = torch.empty_like(weight)
    for column in range(COLUMNS):
        wanted[:, column] = (left[:, column].float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        error = (left[:, column] - wanted[:, column].double() * scale) / found.upper[column, column]
        left[:, column + 1 :] -= error[:, None] * found.upper[column, column + 1 :].double()
    made = round_float8_rows(weight, found, name="w").q.float()
    assert float((made != wanted).float().mean()) < 0.01  # of sums that lie between two numbers


def test_rows_of_zeros_and_outliers_are_defined() -> None:
    x, weight = inputs(32), random(4, 32, seed=7)
    weight[1], weight[2, 3] = 0.0, 1e4
    made = round_float8_rows(weight, factor(x.T @ x, PLAIN, name="x"), name="w")
    values = made.dequantize((1, 32))
    assert values.isfinite().all() and not values[1].any()
    assert values[2, 3] == pytest.approx(1e4, rel=0.07)
    weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="'w' holds nan"):
        round_float8_rows(weight, factor(x.T @ x, PLAIN, name="x"), name="w")


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_pieces_are_the_rows_of_the_whole(rows: int) -> None:
    x, weight = inputs(32), random(10, 32, seed=8)
    lazy = CompensatedFloat8(Constant(weight), (1, 32), compensation=PLAIN, statistics=Known(x), key="x")
    whole = round_float8_rows(weight, factor(x.T @ x, PLAIN, name="x"), name="w")
    for part in ("q", "scale"):
        found = torch.cat([piece.float() for piece in Float8Part(lazy, part).pieces(rows * 32)])
        assert torch.equal(found, getattr(whole, part).float())
    assert torch.equal(torch.cat(list(lazy.pieces(rows * 32))), whole.dequantize((1, 32)))
    assert lazy.held(rows * 32) > 32 * 32 * 4


def test_weights_of_a_program_are_compensated_and_need_calibration() -> None:
    program = before_formats(traced("llama", num_hidden_layers=1))
    rounded = copy_program(program)
    log = choose_formats(program, find_recipe("fp8-gptq"), gathered(WINDOWS))
    kinds = [type(expr).__name__ for name, expr in program.weights.items() if "proj" in name]
    assert kinds == ["CompensatedFloat8"] * 7
    with pytest.raises(ConfigError, match="needs calibration"):
        choose_formats(copy_program(rounded), find_recipe("fp8-gptq"))
    choose_formats(rounded, find_recipe("fp8"))
    names = [name for name in program.weights if "proj" in name]
    assert all(not torch.equal(program.weights[name].load(), rounded.weights[name].load()) for name in names)
    assert not any("rounded to nearest" in line for line in log.declined)


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="one scale a row, not in blocks"):
        Fp8(PerGroup(128), Compensation())
    with pytest.raises(ConfigError, match="a damping above 0"):
        Compensation(damping=0.0)
