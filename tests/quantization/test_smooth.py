"""SmoothQuant and dynamic INT8: what is searched, what the graph becomes, and that the oracle computes integers."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from llmbuild.builder.ir import Constant, Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.passes.edit import arg
from llmbuild.builder.passes.quantize_weights import choose_formats
from llmbuild.builder.pipeline import optimize
from llmbuild.errors import ConfigError, ModelError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.scaled_ops import quantize_rows
from llmbuild.quantization.recipes import PerTensor, PerToken, Recipe, SmoothQuant, customized, find_recipe
from llmbuild.quantization.smooth import SmoothSearch, StaticScale, candidates, static_scale
from support.calibrated import KnownRows, before_formats, gathered
from support.packed_driver import Request, drive
from support.rounding import check_rounded_alike, row_errors
from support.small_programs import count, random
from support.traced import traced

PROMPT = np.random.default_rng(1).integers(3, 250, 20).tolist()
SCHEMES = [SmoothQuant(), SmoothQuant(PerTensor())]
sizes = st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1.0, 30.0, 1e4]), min_size=1, max_size=24)


class Named(Constant):
    """A constant that counts as a weight of the checkpoint."""

    def sources(self) -> frozenset[str]:
        return frozenset({"w"})


def search_of(x: torch.Tensor, weight: torch.Tensor, scheme: SmoothQuant) -> SmoothSearch:
    return SmoothSearch((Named(weight),), scheme, KnownRows(x), "x")


def error(search: SmoothSearch, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> float:
    return float((search.outputs(x, weight, scales, x.abs().amax(0)) - x @ weight.T).double().square().sum())


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.integers(0, 1000), st.sampled_from(SCHEMES))
def test_scales_are_finite_and_never_lose_more_than_none(
    of_x: list, of_w: list, seed: int, scheme: SmoothQuant
) -> None:
    """Zero and tiny channels, channels of 1e4, on either side."""
    columns = min(len(of_x), len(of_w))
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(9, columns, generator=draw) * torch.tensor(of_x[:columns])
    weight = torch.randn(7, columns, generator=draw) * torch.tensor(of_w[:columns])
    search = search_of(x, weight, scheme)
    assert bool(torch.isfinite(search.scales).all()) and bool((search.scales > 0).all())
    assert error(search, x, weight, search.scales) <= error(search, x, weight, torch.ones(columns))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_large_channels_are_made_smaller(scheme: SmoothQuant) -> None:
    size = torch.ones(64)
    size[5] = 100
    x, weight = random(50, 64) * size, random(32, 64, seed=1)
    search = search_of(x, weight, scheme)
    assert int(search.scales.argmax()) == 5
    assert error(search, x, weight, search.scales) < 0.1 * error(search, x, weight, torch.ones(64))


def test_candidates_are_the_equation() -> None:
    x, w = torch.tensor([1.0, 4.0, 16.0]), torch.tensor([2.0, 1.0, 8.0])
    found = candidates(x, w, 2)
    assert len(found) == 4 and found[0].tolist() == [1, 1, 1]
    for alpha, scales in zip((0, 0.5, 1), found[1:], strict=True):
        wanted = x**alpha / w ** (1 - alpha)
        torch.testing.assert_close(scales, wanted / wanted.log().mean().exp())


def test_the_static_scale_clips_nothing_of_the_calibration() -> None:
    x, weight = random(40, 16, seed=3) * 7, random(8, 16)
    search = search_of(x, weight, SCHEMES[1])
    scale = StaticScale(KnownRows(x), "x", search).load()
    smoothed = x / search.scales
    q, scales = quantize_rows(smoothed, scale, torch.int8)
    assert int(q.abs().max()) == 127
    assert float((q.float() * scales - smoothed).abs().max()) <= float(scale) * 0.5001
    assert static_scale(torch.zeros(4)).tolist() == [1.0]
    nan = torch.full((2, 16), float("nan"))
    with pytest.raises(ModelError, match="statistics of the input of 'x' are not finite"):
        StaticScale(KnownRows(nan), "x", None).load()


def logits(program: Program) -> np.ndarray:
    oracle, state = Oracle(program), PagedState(num_blocks=8, block_size=8)
    return drive(lambda step: oracle.run(step, state).numpy(), [Request(PROMPT, prompt=20)], num_blocks=8)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "int8-sq", "int8-sq-static"])
def test_a_model_becomes_products_of_integers(name: str, dtype: torch.dtype) -> None:
    wanted = logits(before_formats(traced("llama", dtype=dtype)))
    program = traced("llama", dtype=dtype)
    after: dict[str, np.ndarray] = {}
    calibrate = gathered([PROMPT])
    optimize(program, find_recipe(name), calibrate=calibrate, after_pass=remember(after))
    assert count(program, "linear_scaled") == 2 * 4 and count(program, "linear_blockwise") == 1
    assert count(program, "quantize_rows") == 2 * 4 and count(program, "round_rows") == count(program, "linear") == 0
    found = logits(program)
    largest = np.abs(wanted).max()
    assert 0 < np.abs(found - wanted).max() / largest < 0.1
    # Products of integers are those of rounded numbers, summed otherwise.
    errors = row_errors(found, after["choose_formats"])
    check_rounded_alike(errors, typical=1e-4 if dtype == torch.float32 else 0.1)


def remember(found: dict[str, np.ndarray]):
    def after_pass(name: str, program: Program) -> None:
        if name == "choose_formats":
            found[name] = logits(program)

    return after_pass


def test_smoothing_helps_where_channels_are_large() -> None:
    """A norm that makes one channel 60 times as large, and weights that make it as small again."""
    errors = {}
    for name in ("int8", "int8-sq"):
        program = before_formats(traced("llama"))
        for node in program.graph.nodes:
            if node.name.endswith("layernorm_weight"):
                program.weights[node.name] = Constant(grown(program.weights[node.name].load(), 60.0))
        wanted = logits(program)
        choose_formats(program, find_recipe(name), gathered([PROMPT]))
        errors[name] = np.abs(logits(program) - wanted).max() / np.abs(wanted).max()
    assert errors["int8-sq"] < 0.5 * errors["int8"]


def grown(weight: torch.Tensor, times: float) -> torch.Tensor:
    weight = weight.clone()
    weight[3] *= times
    return weight


def test_experts_and_routers_say_what_becomes_of_them() -> None:
    program = traced("mixtral")
    optimize(program, find_recipe("int8"))
    log = next(each for each in program.rewrites if each.name == "choose_formats")
    assert any("weights alone are in 8 bits" in line and "experts" in line for line in log.declined)
    assert count(program, "moe_experts_blockwise") == 2 and count(program, "linear_scaled") == 2 * 2
    assert np.isfinite(logits(program)).all()


def test_layers_may_follow_other_recipes() -> None:
    recipe = customized("int8-sq", ["*.0.mlp.up_proj.*"], ["*.1.self_attn.q_proj.*=int8-sq-static"])
    program = before_formats(traced("llama"))
    log = choose_formats(program, recipe, gathered([PROMPT]))
    assert sum("its linears follow different recipes" in line for line in log.declined) == 2
    static = [node for node in program.graph.nodes if "round_rows" in str(node.target) and arg(node, 1) is not None]
    assert len(static) == 1 and np.isfinite(logits(program)).all()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="in at least 1 step, not 0"):
        SmoothQuant(steps=0)
    with pytest.raises(ConfigError, match="recipe 'int8-sq' needs calibration"):
        choose_formats(before_formats(traced("llama")), find_recipe("int8-sq"))
    assert SmoothQuant().activations == PerToken() and isinstance(find_recipe("int8").linear.activations, PerToken)
    assert isinstance(find_recipe("int8"), Recipe) and not find_recipe("int8").calibrated
