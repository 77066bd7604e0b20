"""AWQ: never worse than rounding to nearest on its own measure, and scaling alone changes nothing."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from llmbuild.builder.ir import Constant, Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.passes.edit import arg
from llmbuild.builder.passes.linear_inputs import Known, linear_inputs
from llmbuild.builder.passes.quantize_weights import choose_formats
from llmbuild.builder.passes.scale_inputs import scale_inputs
from llmbuild.builder.pipeline import optimize
from llmbuild.errors import ConfigError, ModelError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.awq import AwqSearch, candidates, lost
from llmbuild.quantization.recipes import Awq, PerChannel, PerGroup, Plain, Recipe, WeightOnly, customized, find_recipe
from llmbuild.quantization.scaled import Scaled, SomeRows, some_rows
from support.calibrated import KnownRows, before_formats, gathered
from support.packed_driver import Request, drive
from support.small_programs import count, random, result, small_program
from support.traced import traced

SCHEMES = [Awq(WeightOnly(4, PerGroup(16))), Awq(WeightOnly(3, PerChannel(), symmetric=False))]
PROMPT = np.random.default_rng(1).integers(3, 250, 20).tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SCHEMES), st.floats(0, 3))
def test_never_worse_than_rounding_to_nearest(seed: int, scheme: Awq, spread: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 40, generator=draw) * (spread * torch.randn(40, generator=draw)).exp()
    weights = [torch.randn(rows, 40, generator=draw) for rows in (8, 3)]
    scales = AwqSearch(tuple(map(Named, weights)), scheme, KnownRows(x), "x").scales
    assert bool((scales > 0).all()) and bool(torch.isfinite(scales).all())
    losses = [sum(lost(w, s, scheme, x) for w in weights) for s in (scales, torch.ones(40))]
    assert losses[0] <= losses[1]


def test_salient_channels_are_held_finer() -> None:
    """One channel of large inputs: its weights lose less, and so do the outputs."""
    size = torch.ones(64)
    size[5] = 50
    x, weight, scheme = random(200, 64) * size, random(32, 64, seed=1), Awq(WeightOnly(3, PerGroup(64)))
    scales = AwqSearch((Named(weight),), scheme, KnownRows(x), "x").scales
    assert float(scales.argmax()) == 5
    assert lost(weight, scales, scheme, x) < 0.5 * lost(weight, torch.ones(64), scheme, x)


def test_rows_that_are_tried_are_spread_over_all_weights_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbuild.quantization.scaled.PIECE", 5 * 16)  # pieces of five rows
    weights = torch.arange(37.0)[:, None] * torch.ones(16)
    found = some_rows((Named(weights[:24]), Named(-weights[24:])), most=10)
    assert isinstance(found, SomeRows) and found.absmax.tolist() == [36.0] * 16
    assert found.rows[:, 0].abs().tolist() == list(range(0, 37, 4))


def test_a_weight_that_is_not_finite_is_refused_by_name_and_place() -> None:
    weight = W1.clone()
    weight[20, 3] = float("nan")
    with pytest.raises(ModelError, match=r"holds nan(.|\n)*row 20, column 3"):
        some_rows((Named(W1), Named(weight)))


def test_candidates_begin_with_ones_and_end_with_the_mean() -> None:
    mean = torch.tensor([1.0, 4.0, 0.0, 16.0])
    found = candidates(mean, 4)
    assert len(found) == 5 and found[0].tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(found[4][1] / found[4][0], torch.tensor(4.0))
    assert all(bool(torch.isfinite(scales).all()) for scales in candidates(torch.zeros(4), 4))


class Known16:
    """Statistics of inputs whose channel 3 is large."""

    def gram(self, key: str) -> torch.Tensor:
        return self.mean(key).float().square().diag()

    def mean(self, key: str) -> torch.Tensor:
        mean = torch.ones(16, dtype=torch.float64)
        mean[3] = 30
        return mean

    def absmax(self, key: str) -> torch.Tensor:
        return 3 * self.mean(key).float()

    def sample(self, key: str) -> torch.Tensor:
        return random(8, 16, seed=9) * self.mean(key).float()


def scaled(program: Program, scheme: Awq = Awq(WeightOnly(3, PerGroup(16)))) -> list[str]:
    inputs = linear_inputs(program)
    weights = [arg(node, 1) for each in inputs for node in each.linears]
    statistics = Known16()
    known = {weight: Known(statistics, "x") for weight in weights}
    return scale_inputs(program, inputs, dict.fromkeys(weights, scheme), known).declined


class Named(Constant):
    """A constant that counts as a weight of the checkpoint."""

    def sources(self) -> frozenset[str]:
        return frozenset({f"w{tuple(self.value.shape)}{float(self.value.flatten()[0])}"})


def named(program: Program) -> Program:
    for name, expr in program.weights.items():
        program.weights[name] = Named(expr.load())
    return program


linear, rms_norm = torch.nn.functional.linear, torch.ops.llmbuild.rms_norm
NORM, W1, W2, SQUARE = random(16, seed=1), random(24, 16, seed=2), random(8, 16, seed=3), random(16, 16, seed=4)


def of_norm(x, p, norm, one, two):
    y = rms_norm(x, norm, 1e-6)
    return torch.cat((linear(y, one), linear(y, two)), dim=-1)


def of_layer_norm(x, p, norm, bias, one):
    return linear(torch.nn.functional.layer_norm(x, (16,), norm, bias), one)


def of_gate(x, p, gate, up, bias, down):
    y = torch.ops.llmbuild.gated_activation(linear(x, gate), linear(x, up, bias), "silu")
    return linear(y, down)


CASES = {
    "rms_norm": (of_norm, dict(norm=NORM, one=W1, two=W2), {"norm", "one", "two"}),
    "layer_norm": (of_layer_norm, dict(norm=NORM, bias=random(16, seed=5), one=W1), {"norm", "bias", "one"}),
    "gate": (
        of_gate,
        dict(gate=SQUARE, up=random(16, 16, seed=6), bias=random(16, seed=7), down=W1),
        {"up", "bias", "down"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_scaling_alone_changes_nothing(case: str) -> None:
    body, weights, expected = CASES[case]
    program = named(small_program(body, **weights))
    before = result(program)
    scaled(program)
    touched = {name for name, expr in program.weights.items() if isinstance(expr, Scaled)}
    assert touched == expected
    assert not program.weights[sorted(touched)[0]].load().equal(weights[sorted(touched)[0]])
    torch.testing.assert_close(result(program), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "weights", "reason"),
    [
        (
            lambda x, p, n, w: linear(rms_norm(x, n, 1e-6), w) + rms_norm(x, n, 1e-6)[:, :8],
            dict(n=NORM, w=W2),
            "serves",
        ),
        (lambda x, p, w: linear(rms_norm(x, None, 1e-6), w), dict(w=W1), "has no weight"),
        (lambda x, p, w: linear(x.sin(), w), dict(w=W1), "made by sin aten.sin.default"),
        (
            lambda x, p, n, w: (lambda y: linear(y, w) * y.sum(-1, keepdim=True))(rms_norm(x, n, 1e-6)),
            dict(n=NORM, w=W1),
            "it is also read by sum",
        ),
    ],
)
def test_what_cannot_be_scaled_exactly_is_left_with_a_reason(body, weights, reason: str) -> None:
    program = named(small_program(body, **weights))
    before = dict(program.weights)
    declined = scaled(program)
    assert program.weights == before
    assert any(reason in line for line in declined), declined


def test_pieces_are_the_rows_of_the_whole() -> None:
    search_of = AwqSearch((Named(W1),), SCHEMES[0], Known16(), "x")
    columns = Scaled(Named(W1), search_of, columns=True)
    assert torch.cat(list(columns.pieces(16 * 5))).equal(columns.load()) and columns.load().dtype == torch.float32
    rows = Scaled(Named(SQUARE.bfloat16()), search_of, columns=False)
    assert torch.cat(list(rows.pieces(16 * 5))).equal(rows.load()) and rows.load().dtype == torch.bfloat16
    vector = Scaled(Named(NORM), search_of, columns=False)
    torch.testing.assert_close(vector.load() * search_of.scales, NORM)


def logits(program: Program) -> np.ndarray:
    oracle, state = Oracle(program), PagedState(num_blocks=8, block_size=8)
    return drive(lambda step: oracle.run(step, state).numpy(), [Request(PROMPT, prompt=20)], num_blocks=8)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_scaled_where_its_norms_and_gates_allow_it(dtype: torch.dtype) -> None:
    program = before_formats(traced("llama", dtype=dtype))
    plain = before_formats(traced("llama", dtype=dtype))
    eight = Awq(WeightOnly(8, PerGroup(128)))
    log = choose_formats(program, Recipe("mine", "", eight, eight.rounding, Plain()), gathered([PROMPT]))
    assert log.count == 15
    assert sum("not scaled" in line for line in log.declined) == 2  # o_proj of each layer
    assert all("made by" in line for line in log.declined if "not scaled" in line)
    assert all(program.weights[node.name].dtype == node.meta["val"].dtype for node in weights_of(program))
    wanted = logits(plain)
    assert 0 < np.abs(logits(program) - wanted).max() / np.abs(wanted).max() < (0.05 if dtype == torch.float32 else 0.1)


def weights_of(program: Program) -> list:
    return [node for node in program.graph.nodes if program.weight_of(node) is not None]


def test_other_recipes_beside_it_are_left_in_peace() -> None:
    recipe = customized("int4-awq", ["*.0.mlp.up_proj.*"], ["*.1.self_attn.q_proj.*=int4-gptq"])
    program = before_formats(traced("llama"))
    log = choose_formats(program, recipe, gathered([PROMPT]))
    assert sum("its linears follow different recipes" in line for line in log.declined) == 2
    assert np.isfinite(logits(program)).all()


def test_the_whole_pipeline_merges_what_was_scaled_together() -> None:
    program = traced("llama")
    optimize(program, find_recipe("int4-awq"), calibrate=gathered([PROMPT]))
    assert count(program, "linear_blockwise") == 2 * 4 + 1 and count(program, "linear") == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="tries at least 1 exponent, not 0"):
        Awq(WeightOnly(4, PerGroup(128)), steps=0)
