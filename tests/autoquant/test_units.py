"""Units, what they cost under a recipe, and that a unit tried alone is what a build of it computes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from llmbuild.builder.accuracy.walk import copy_program
from llmbuild.builder.autoquant.choice import quant_config
from llmbuild.builder.autoquant.held_out import HeldOut
from llmbuild.builder.autoquant.sensitivity import sensitivities
from llmbuild.builder.autoquant.units import find_options, find_units, other_bytes
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.ir import Program
from llmbuild.builder.pipeline import LAST_EXACT, optimize
from llmbuild.quantization.recipes import customized, find_recipe
from support.calibrated import before_formats
from support.tiny_gguf import write_gguf
from support.tiny_models import tiny_model
from support.traced import traced

WINDOWS = [tuple(np.random.default_rng(seed).integers(3, 250, size).tolist()) for seed, size in ((1, 24), (2, 17))]


@pytest.fixture(scope="module")
def llama() -> Program:
    """A program that no test changes."""
    return program_of("llama")


def program_of(family: str, **changes: object) -> Program:
    return before_formats(traced(family, **changes))


def built(exact: Program, recipes: list[str]) -> Program:
    """Return the program that a build with this choice compiles."""
    units = find_units(exact)
    config = quant_config(exact, units, recipes)
    program = copy_program(exact)
    optimize(program, customized(config.quant, config.exclude, config.quant_layers), after=LAST_EXACT)
    return program


def test_units_of_a_llama(llama: Program) -> None:
    units = find_units(llama)
    layer = ["self_attn.{k_proj,q_proj,v_proj}", "self_attn.o_proj", "mlp.{gate_proj,up_proj}", "mlp.down_proj"]
    names = [f"model.layers.{index}.{name}" for index in (0, 1) for name in layer]
    assert [unit.name for unit in units] == [*names, "lm_head"]
    assert units[0].tensors == tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "kqv")
    assert [unit.role for unit in units] == ["linear"] * 8 + ["lm_head"]
    assert {unit.share for unit in units} == {1.0}


@pytest.mark.slow
def test_units_of_a_mixture_leave_the_router_out() -> None:
    program = program_of("mixtral")
    units = find_units(program)
    assert sum("experts" in unit.name for unit in units) == 2
    assert not any("gate.weight" in tensor for unit in units for tensor in unit.tensors)
    experts = next(unit for unit in units if "experts" in unit.name)
    config = tiny_model("mixtral").config
    assert experts.share == config.num_experts_per_tok / config.num_local_experts
    (option,) = [find_options(program, [experts], "int8-wo", 4)[0]]
    assert option.read == pytest.approx(option.stored * experts.share, abs=1)


def test_bytes_are_counted_as_documented(llama: Program) -> None:
    down = [unit for unit in find_units(llama) if unit.name.endswith("0.mlp.down_proj")]  # [64, 96]
    stored = {name: find_options(llama, down, name, 2)[0].stored for name in ("none", "int4-wo", "int8-wo", "fp8")}
    assert stored == {
        "none": 64 * 96 * 2,
        "int4-wo": 64 * 96 // 2 + 64 * 3 * 2,
        "int8-wo": 64 * 96 + 64 * 3 * 2,
        "fp8": 64 * 96 + 64 * 4,
    }
    asymmetric = find_options(llama, down, "int4-wo-g32-asym", 2)[0]
    assert asymmetric.stored == 64 * 96 // 2 + 64 * 3 * 4
    stored_else, read_else = other_bytes(llama, find_units(llama), 2)
    embedding = tiny_model("llama").config.vocab_size * 64 * 2
    assert stored_else - read_else == embedding  # looked up, not read


@pytest.mark.parametrize(
    ("family", "changes", "recipes"),
    [
        ("llama", {}, ("int4-wo", "int8", "fp8", "none")),
        pytest.param("llama", {"hidden_size": 128, "intermediate_size": 256}, ("fp8-block",), marks=pytest.mark.slow),
        pytest.param("llama", {"tie_word_embeddings": True}, ("int4-wo", "fp8", "int8"), marks=pytest.mark.slow),
        pytest.param("mixtral", {}, ("int4-wo",), marks=pytest.mark.slow),
        pytest.param("falcon", {}, ("int8-wo", "int8"), marks=pytest.mark.slow),
        pytest.param("gemma2", {}, ("int4-wo", "fp8"), marks=pytest.mark.slow),
        pytest.param("cohere", {}, ("int4-wo", "int8"), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_a_unit_tried_alone_is_what_a_build_of_it_computes(family, changes, recipes) -> None:
    """Forked at the unit, or passed through all passes with a rule for that unit: the same KL."""
    exact = program_of(family, **changes)
    units = find_units(exact)
    options = [list(each) for each in zip(*(find_options(exact, units, name, 4) for name in recipes), strict=True)]
    alone = sensitivities(exact, units, options, WINDOWS)
    reference = copy_program(exact)
    optimize(reference, find_recipe("none"), after=LAST_EXACT)
    held_out = HeldOut(reference, WINDOWS)
    for place in (0, len(units) // 2, len(units) - 1):
        for number, recipe in enumerate(recipes):
            choice = ["none"] * len(units)
            choice[place] = recipe
            expected = held_out.figures(built(exact, choice)).kl_mean
            assert alone[place][number] == pytest.approx(expected, rel=1e-3, abs=1e-9), (units[place].name, recipe)
    rounded = [max(each) for each in alone]
    assert min(rounded) > 0


def test_batches_of_forks_give_the_same(llama: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    units = find_units(llama)
    options = [[each] for each in find_options(llama, units, "int4-wo", 4)]
    seen: list[tuple[int, int, str]] = []
    together = sensitivities(llama, units, options, WINDOWS, lambda *state: seen.append(state))
    assert seen[-1][:2] == (3, 3)
    monkeypatch.setattr("llmbuild.builder.autoquant.sensitivity.CARRIED_BYTES", 1)
    assert sensitivities(llama, units, options, WINDOWS) == together


def test_what_a_recipe_does_not_round_is_exact() -> None:
    exact = program_of("llama", intermediate_size=100, num_hidden_layers=1)  # no multiple of 16
    units = find_units(exact)
    options = find_options(exact, units, "fp8", 2)
    assert [option.exact for option in options[:4]] == [False, False, True, True]
    assert options[2].stored == 2 * 100 * 64 * 2 and not options[2].calls
    assert all(option.exact for option in find_options(exact, units, "none", 2))
    assert torch.equal(
        options[2].weights[units[2].weights[0].name].load(), exact.weights[units[2].weights[0].name].load()
    )


@pytest.mark.slow
def test_blocks_of_a_gguf_are_kept_where_a_recipe_has_as_many_bits(tmp_path: Path) -> None:
    """Of units; what belongs to none is dequantized by every choice."""
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", type_name="Q8_0")
    exact = before_formats(load_program(path, dtype=torch.float32))
    units = find_units(exact)
    kept, rounded, plain = (find_options(exact, units, name, 4) for name in ("int8-wo", "int4-wo", "none"))
    assert all(option.exact for option in (*kept, *plain)) and not any(option.exact for option in rounded)
    assert all(a.stored > b.stored > c.stored for a, b, c in zip(plain, kept, rounded, strict=True))
    embedding = next(expr for expr in exact.weights.values() if expr.sources() == {"token_embd.weight"})
    assert embedding.block_format is not None
    stored, read = other_bytes(exact, units, 4)
    assert stored - read == 4 * math.prod(embedding.shape)


def test_a_config_rounds_what_was_chosen_and_nothing_else(llama: Program) -> None:
    units = find_units(llama)
    recipes = ["int4-wo"] * len(units)
    recipes[1], recipes[2], recipes[8] = "none", "int8-wo", "int4-wo"
    config = quant_config(llama, units, recipes)
    assert config.quant == "int4-wo" and config.exclude == ("model.layers.0.self_attn.o_proj.weight",)
    # int4-wo by itself would hold the lm_head in 8 bits.
    assert config.quant_layers == (
        "model.layers.0.mlp.gate_proj.weight=int8-wo",
        "model.layers.0.mlp.up_proj.weight=int8-wo",
        "lm_head.weight=int4-wo",
    )
    assert quant_config(llama, units, ["none"] * len(units)).quant == "none"
