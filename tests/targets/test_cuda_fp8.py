"""FP8 recipes: what becomes a product of 8-bit floats, and plans in the interpreter against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild.builder.accuracy.walk import copy_program
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.cuda.late_scales import late_scales
from llmbuild.builder.targets.cuda.lowering import Planned, plan_program
from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter
from llmbuild.engine.launch_plan import GemmOp
from llmbuild.errors import ModelError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.recipes import customized, find_recipe, multiplying_float8
from support.calibrated import gathered
from support.packed_driver import Request, drive
from support.plans import HARDWARE
from support.rounding import check_rounded_alike, row_errors
from support.small_programs import count
from support.tiny_models import tiny_model
from support.tiny_quantized import STORED, edit_tensors, save_quantized
from support.traced import traced

LIMITS = Limits(max_batch_size=8, max_num_tokens=32, max_seq_len=64, block_size=8)
WINDOWS = [np.random.default_rng(7).integers(3, 250, 24).tolist() for _ in range(3)]
BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}


def program_of(
    family: str,
    recipe: str,
    *,
    dtype: torch.dtype = torch.float32,
    exclude: tuple[str, ...] = (),
    layers: tuple[str, ...] = (),
    **config: Any,
) -> Program:
    program = traced(family, dtype=dtype, **config)
    optimize(program, customized(recipe, exclude, layers), calibrate=gathered(WINDOWS))
    return program


def logits_of(program: Program, run: Any) -> np.ndarray:
    draw = np.random.default_rng(1).integers(3, 250, 26).tolist()
    requests = [Request(draw[:20], prompt=18), Request(draw[20:24], prompt=1, arrives=1)]
    return np.concatenate(drive(run, requests, num_blocks=8, all_rows=False))


def errors(program: Program, planned: Planned) -> np.ndarray:
    """Return the difference of each row of logits to the oracle's."""
    state, oracle = PagedState(num_blocks=8, block_size=8), Oracle(program)
    expected = logits_of(program, lambda step: oracle.run(step, state).numpy())
    found = logits_of(program, PlanInterpreter(planned, num_blocks=8).forward)
    asked = ~np.isnan(expected).any(axis=1)
    return row_errors(found[asked], expected[asked])


def plan(program: Program, **hardware: Any) -> Planned:
    return plan_program(program, LIMITS, dataclasses.replace(HARDWARE, **hardware))


def declined(program: Program) -> str:
    return "\n".join(next(r for r in program.rewrites if r.name == "choose_formats").declined)


# How a plan computes: (scales after the products, hardware). With the library, with kernels for few rows, and on a GPU
# where the library has no scales.
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "library": (False, {}),
    "few rows": (False, {"small_gemms": True}),
    "sm89": (False, {"sm": 89}),
    "late": (True, {}),
    "late, few rows": (True, {"small_gemms": True}),
}
# All variants of one recipe, and of the others those in which they differ from it; the rest is marked slow.
CASES: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", "fp8", {}, tuple(VARIANTS)),
    ("qwen3", "fp8-lm-head", {"vocab_size": 304, "tie_word_embeddings": False}, ("few rows", "late")),
    ("qwen3", "fp8-static", {}, ("library", "late")),
    ("llama", "fp8-block", BLOCKS, ("library", "sm89")),
    ("llama", "fp8-gptq", {}, ()),
    ("mixtral", "fp8", {}, ()),
]


def cases() -> Iterator[Any]:
    for family, recipe, config, quick in CASES:
        rest = tuple(name for name in VARIANTS if name not in quick)
        for variants, marks in ((quick, []), (rest, [pytest.mark.slow])):
            if variants:
                name = f"{family}-{recipe}-{'slow' if marks else 'quick'}"
                yield pytest.param(family, recipe, config, variants, marks=marks, id=name)


@pytest.mark.parametrize(("family", "recipe", "config", "variants"), list(cases()))
def test_plans_compute_what_the_oracle_does(
    family: str, recipe: str, config: dict[str, Any], variants: tuple[str, ...]
) -> None:
    """18 rows, few and one."""
    early = program_of(family, recipe, **config)
    products = count(early, "linear_scaled")
    assert products == 8 + (recipe == "fp8-lm-head") - 4 * (family == "mixtral")
    late = copy_program(early)
    assert late_scales(late).count == (0 if recipe == "fp8-block" else products - (recipe == "fp8-lm-head"))
    for name in variants:
        after, hardware = VARIANTS[name]
        if after and recipe == "fp8-block":
            continue
        program = late if after else early
        planned = plan(program, **hardware)
        numbers = [op.number_dtype for op in planned.plan.ops if isinstance(op, GemmOp)]
        assert after or numbers.count("float8_e4m3fn") == products
        check_rounded_alike(errors(program, planned), typical=1e-2)  # 7 rows


def test_a_half_precision_plan_is_near_the_oracle() -> None:
    """What the oracle rounds to bfloat16 before it rounds it to 8 bits, a row program rounds once."""
    program = program_of("llama", "fp8", dtype=torch.bfloat16)
    assert errors(program, plan(program)).max() < 0.1


def test_scales_stay_in_products_of_float16_whose_numbers_would_overflow() -> None:
    assert late_scales(program_of("llama", "fp8", dtype=torch.float16)).count == 0
    program = program_of("llama", "fp8", dtype=torch.bfloat16)
    assert late_scales(program).count == count(program, "linear_numbers") == 8
    assert errors(program, plan(program)).max() < 0.1


def test_the_loss_is_that_of_8_bit_floats() -> None:
    """A weight rounded twice, a scale left out or a product in the wrong order loses more."""
    exact = program_of("llama", "none", **BLOCKS)
    states = [PagedState(num_blocks=8, block_size=8) for _ in range(5)]
    wanted = logits_of(exact, lambda step, run=Oracle(exact): run.run(step, states[0]).numpy())
    asked = ~np.isnan(wanted).any(axis=1)
    for state, recipe in zip(states[1:], ("fp8", "fp8-lm-head", "fp8-static", "fp8-block"), strict=True):
        rounded = traced("llama", **BLOCKS)
        optimize(rounded, find_recipe(recipe), calibrate=gathered(WINDOWS))
        found = logits_of(rounded, lambda step, run=Oracle(rounded), state=state: run.run(step, state).numpy())
        error = np.linalg.norm((found - wanted)[asked]) / np.linalg.norm(wanted[asked])
        assert 1e-3 < error < 0.25, recipe


def test_experts_and_routers_stay_in_the_computation_dtype_and_that_is_said() -> None:
    program = program_of("mixtral", "fp8")
    assert count(program, "moe_experts") == 2 and count(program, "linear_scaled") == 4
    assert "experts have no products of 8-bit floats: they stay in the computation dtype" in declined(program)
    assert "chooses experts, which rounding would change" in declined(program)


def test_what_is_excluded_or_follows_another_recipe_is_not_merged_with_the_rest() -> None:
    program = program_of("llama", "fp8", exclude=("*.0.*.v_proj.*",), layers=("*.1.*.down_proj.*=int8-wo",))
    assert count(program, "linear_scaled") == 7  # of 8 without the rule; one has q and k alone
    assert count(program, "linear_blockwise") == 1 and count(program, "linear") == 2
    assert "v_proj.weight is excluded by" in declined(program)


def test_a_tied_head_stays_plain_and_odd_sizes_do() -> None:
    tied = program_of("llama", "fp8-lm-head", tie_word_embeddings=True)
    assert "it is the embedding too, which is looked up unrounded" in declined(tied)
    odd = program_of("llama", "fp8", intermediate_size=100)
    assert "need sizes that are multiples of 16, not [64, 100]" in declined(odd)
    assert count(odd, "linear_scaled") == 4
    narrow = program_of("llama", "fp8-block")
    assert "rows of 64 numbers are not made of blocks of 128" in declined(narrow)


def test_linears_of_one_value_share_its_8_bit_floats() -> None:
    program = program_of("llama", "fp8", layers=("*.q_proj.*=fp8-static",))
    quantizers = count(program, "quantize_rows")
    assert count(program, "linear_scaled") == 10 and quantizers == 10  # q apart: with a scale of its own
    plain = program_of("llama", "fp8")
    assert count(plain, "quantize_rows") == count(plain, "linear_scaled") == 8


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Program, Path, torch.nn.Module]]:
    """Return what gives a program of a tiny Llama stored in a format, its directory, and the model that it holds."""

    @cache
    def load(name: str) -> tuple[Program, Path, torch.nn.Module]:
        path, model = save_quantized(tiny_model("llama"), tmp_path_factory.mktemp("stored"), STORED[name])
        return load_program(path, dtype=torch.float32), path, model

    def copied(name: str) -> tuple[Program, Path, torch.nn.Module]:
        program, path, model = load(name)
        return copy_program(program), path, model

    return copied


@pytest.mark.parametrize(("name", "shared"), [("modelopt-fp8", "static"), ("float-quantized-dynamic", "dynamic")])
def test_stored_8_bit_floats_are_multiplied_as_they_are_stored(name: str, shared: str, stored) -> None:
    program, _, model = stored(name)
    optimize(program, multiplying_float8(find_recipe("stored")))
    assert count(program, "linear_scaled") == 8 and count(program, "linear") == 1
    numbers = {key: expr for key, expr in program.weights.items() if expr.dtype == torch.float8_e4m3fn}
    (key,) = [key for key in numbers if "layers_1_mlp_down_proj" in key]
    scale = program.weights[key.removesuffix("_q") + "_scale"].load()
    wanted = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(numbers[key].load().float() * scale, wanted, rtol=1e-6, atol=0)
    static = [key for key in program.weights if key.endswith("_input_scale")]
    assert bool(static) == (shared == "static")
    assert all(program.weights[key].load().tolist() == [0.5] for key in static)


def test_stored_8_bit_floats_are_dequantized_where_products_do_not_have_them(stored) -> None:
    """For a target without such products, and where blocks are of another size than those of products."""
    program, *_ = stored("modelopt-fp8")
    optimize(program, find_recipe("stored"))
    assert count(program, "linear_scaled") == 0
    assert "dequantized from ModelOpt float8, one scale: the target has no products of 8-bit" in declined(program)
    program, *_ = stored("fp8-blocks")
    optimize(program, multiplying_float8(find_recipe("stored")))
    assert count(program, "linear_scaled") == 0 and "no product has such scales" in declined(program)


UP_SCALE = "model.layers.0.mlp.up_proj.input_scale"


def test_different_scales_of_activations_are_not_merged(stored) -> None:
    """Scales are read from the file when the formats are chosen."""
    program, path, _ = stored("modelopt-fp8")
    with changed(path, 0.25):
        optimize(program, multiplying_float8(find_recipe("stored")))
        assert count(program, "linear_scaled") == 9


@pytest.mark.parametrize("bad", [0.0, float("nan"), -1.0])
def test_a_stored_scale_that_is_no_positive_number_is_refused(bad: float, stored) -> None:
    program, path, _ = stored("modelopt-fp8")
    with (
        changed(path, bad),
        pytest.raises(ModelError, match=r"scale of the activations of 'model\.layers\.0\.mlp\.up_proj\.weight' is"),
    ):
        optimize(program, multiplying_float8(find_recipe("stored")))


@contextmanager
def changed(path: Path, scale: float) -> Iterator[None]:
    """Put another scale of the activations of one linear into the file, for a while."""
    edit_tensors(path, lambda tensors: tensors.update({UP_SCALE: torch.tensor(scale)}))
    try:
        yield
    finally:
        edit_tensors(path, lambda tensors: tensors.update({UP_SCALE: torch.tensor(0.5)}))
