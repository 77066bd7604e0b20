"""Calibration of a tiny model, layer by layer, against transformers, and what is refused."""

from __future__ import annotations

import weakref

import pytest
import torch

from llmbuild.builder.calibrate import calibrate, segments
from llmbuild.builder.ir import Constant
from llmbuild.builder.passes.linear_inputs import linear_inputs
from llmbuild.builder.passes.quantize_weights import choose_formats
from llmbuild.errors import ConfigError, ModelError
from llmbuild.quantization.recipes import find_recipe
from support.calibrated import before_formats, statistics_of
from support.tiny_models import tiny_model
from support.traced import traced

DRAWN = torch.randint(3, 250, (3, 40), generator=torch.Generator().manual_seed(1))
WINDOWS = [row[: 40 - 3 * place].tolist() for place, row in enumerate(DRAWN)]


def test_statistics_are_those_of_what_the_linears_of_transformers_read() -> None:
    model = tiny_model("llama")
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(f"{name}.weight", []).append(args[0][0])
            )
    with torch.no_grad():
        for window in WINDOWS:
            model(torch.tensor([window]), use_cache=False)
    program = before_formats(traced("llama"))
    found = statistics_of(program, WINDOWS)
    assert len(found) == 2 * 4 + 1  # of each layer: q k v, o, gate up, down; and lm_head
    weights = {name for each in linear_inputs(program) for name in each.weights(program)}
    assert {name.removeprefix("model.") for name in weights} == {name.removeprefix("model.") for name in seen}
    for key, statistics in found.items():
        x = torch.cat(seen[key])
        assert statistics.rows == len(x) == sum(map(len, WINDOWS))
        torch.testing.assert_close(statistics.absmax, x.abs().amax(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(statistics.mean, x.abs().double().mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(statistics.gram, x.T @ x, rtol=1e-3, atol=1e-3)


def test_the_same_windows_give_the_same_bits_and_parts_merge_to_the_whole() -> None:
    program = before_formats(traced("llama"))
    whole, again = statistics_of(program, WINDOWS), statistics_of(before_formats(traced("llama")), WINDOWS)
    first, rest = statistics_of(program, WINDOWS[:1]), statistics_of(program, WINDOWS[1:])
    for key, statistics in whole.items():
        assert statistics.gram is not None and again[key].gram is not None and statistics.gram.equal(again[key].gram)
        assert statistics.total.equal(again[key].total)
        first[key].merge(rest[key])
        assert first[key].histogram.counts.equal(statistics.histogram.counts)
        assert first[key].absmax.equal(statistics.absmax) and first[key].rows == statistics.rows
        torch.testing.assert_close(first[key].gram, statistics.gram, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mixtral"])
def test_other_families_are_calibrated_too(family: str) -> None:
    program = before_formats(traced(family, dtype=torch.bfloat16))
    found = statistics_of(program, WINDOWS)
    assert len(found) == len(linear_inputs(program)) >= 5
    assert all(statistics.rows == sum(map(len, WINDOWS)) for statistics in found.values())


def test_one_layer_of_weights_is_held_at_a_time() -> None:
    program = before_formats(traced("llama"))
    living: set[str] = set()
    most: list[set[str]] = []

    def counted(name: str) -> Constant:
        value = program.weights[name].load()

        class Watched(Constant):
            def load(self) -> torch.Tensor:
                fresh = value.clone()
                living.add(name)
                most.append(set(living))
                weakref.finalize(fresh, living.discard, name)
                return fresh

            def sources(self) -> frozenset[str]:
                return sources

        sources = program.weights[name].sources()
        return Watched(value)

    for name in list(program.weights):
        program.weights[name] = counted(name)
    statistics_of(program, WINDOWS)
    layers = [{name.split("layers_")[1][0] for name in names if "layers_" in name} for names in most]
    # A segment holds the rest of one layer and the projections that lead to the next attention.
    assert max(map(len, layers)) == 2 and not any("o_proj" in n and "layers_0" in n for n in most[-1])
    assert max(len(names) for names in most) < len(program.weights)


def test_segments_end_with_attention_and_stop_at_the_last_input_wanted() -> None:
    program = before_formats(traced("llama"))
    inputs = linear_inputs(program)
    parts = segments(program.graph, [each.x for each in inputs])
    assert len(parts) == 3 and all("paged_attention" in str(part[-1].target) for part in parts[:2])
    assert parts[-1][-1] is inputs[-1].x
    assert len(segments(program.graph, [inputs[0].x])) == 1


def test_nan_names_the_layer() -> None:
    program = before_formats(traced("llama"))
    name = next(name for name in program.weights if "layers_1_mlp_up_proj" in name)
    value = program.weights[name].load()
    value[3] = float("nan")
    sources = program.weights[name].sources()

    class Broken(Constant):
        def sources(self) -> frozenset[str]:
            return sources

    program.weights[name] = Broken(value)
    with pytest.raises(
        ModelError, match=r"input of 'model.layers.1.mlp.down_proj.weight' holds NaN during calibration"
    ):
        statistics_of(program, WINDOWS)


def test_progress_ends_where_it_should() -> None:
    program, told = before_formats(traced("llama")), []
    calibrate(
        program,
        WINDOWS,
        linear_inputs(program),
        grams=[],
        write=lambda key, statistics: None,
        progress=lambda done, total, label: told.append((done, total)),
    )
    assert told == [(done, 9) for done in range(1, 10)]


def test_a_recipe_that_needs_calibration_says_so() -> None:
    with pytest.raises(ConfigError, match="recipe 'int4-gptq' needs calibration"):
        choose_formats(before_formats(traced("llama")), find_recipe("int4-gptq"))
