"""Errors by layer: every layer is found and matched, and the one that errs is the one that is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmbuild.builder.accuracy.layers import Layer, compare_outputs, layer_errors, layers_of, tensors_name
from llmbuild.builder.accuracy.walk import Runner, copy_program
from llmbuild.builder.accuracy.windows import steps
from llmbuild.builder.ir import Constant, Map, Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import LAST_EXACT, optimize, phases
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.primitives import quantize_blocks
from llmbuild.quantization.recipes import Recipe, WeightOnly, find_recipe
from support.traced import traced

WINDOW = (72, 5, 41, 9, 17, 33, 64, 80, 12, 3, 99, 7)


def both(family: str, recipe: Recipe) -> tuple[Program, Program]:
    """The program before its weights are quantized, and the one that a target gets."""
    program = traced(family)
    kept: list[Program] = []

    def keep(name: str, state: Program) -> None:
        if name == LAST_EXACT:
            kept.append(copy_program(state))

    optimize(program, recipe, after_pass=keep)
    return kept[0], program


def errors(family: str, recipe: Recipe):
    reference, candidate = both(family, recipe)
    return layer_errors(Runner(reference, hold=False), Runner(candidate, hold=True), WINDOW)


def test_the_last_exact_pass_comes_right_before_formats_are_chosen() -> None:
    names = [name for name, _ in phases(find_recipe("none"))]
    assert names.index("choose_formats") == names.index(LAST_EXACT) + 1


def test_a_copy_is_independent_and_computes_the_same() -> None:
    reference, candidate = both("llama", find_recipe("int4-wo"))
    assert any("blockwise" in str(node.target) for node in candidate.graph.nodes)
    assert not any("blockwise" in str(node.target) for node in reference.graph.nodes)
    plain = traced("llama")
    (step, _) = next(steps(WINDOW, chunk=12, block_size=16))
    expected = Oracle(plain).run(step, PagedState(1, 16)).numpy()
    for hold in (True, False):
        runner = Runner(reference, hold=hold)
        for _ in range(2):
            assert abs(runner.forward(step) - expected).max() < 1e-4


def test_every_layer_of_a_llama_is_found_with_and_without_merging() -> None:
    reference, candidate = both("llama", find_recipe("int4-wo"))
    found = layers_of(reference)
    names = [f"model.layers.{index}.{part}" for index in (0, 1) for part in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )]  # fmt: skip
    linears = {layer.name for layer in found if layer.kind == "linear"}
    assert set(names) <= linears and len(linears) == len(names) + 1  # and the lm_head
    for kind in ("attention", "block"):
        assert [layer.name for layer in found if layer.kind == kind] == ["layer 0", "layer 1"]
    assert [layer.kind for layer in found].count("embedding") == 1
    assert found.keys() == layers_of(candidate).keys()


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt2", "mixtral", "cohere"])
def test_families_match_whole(family: str) -> None:
    found = errors(family, find_recipe("int4-wo"))
    assert found.unmatched == ()
    kinds = [each.layer.kind for each in found.errors]
    assert kinds.count("attention") == 2
    assert kinds.count("block") == 2
    assert ("experts" in kinds) == (family == "mixtral")
    assert all(0 <= each.own < 0.5 and each.error < 2 for each in found.errors)
    assert any(each.own > 0.01 for each in found.errors if each.layer.kind == "linear")


def test_no_quantization_is_no_error() -> None:
    found = errors("llama", find_recipe("none"))
    assert all(each.error < 1e-5 and each.own < 1e-5 for each in found.errors)
    assert all(each.cosine == pytest.approx(1, abs=1e-6) for each in found.errors)


def test_only_what_is_quantized_errs_itself() -> None:
    """All but one linear excluded: its own error is the only one, and what comes after inherits some."""
    patterns = ("*self_attn*", "*mlp.gate_proj*", "*mlp.up_proj*", "*layers.1*", "*embed*", "*lm_head*")
    found = errors("llama", replace(find_recipe("int4-wo"), exclude=patterns))
    down = Layer("linear", "model.layers.0.mlp.down_proj")
    by_layer = {each.layer: each for each in found.errors}
    assert found.worst(1)[0].layer == down
    assert by_layer[down].own > 0.01
    assert by_layer[down].own == pytest.approx(by_layer[down].error, rel=1e-3)
    assert all(each.own < 1e-5 for layer, each in by_layer.items() if layer not in (down, Layer("block", "layer 0")))
    assert by_layer[Layer("linear", "model.layers.0.mlp.up_proj")].error < 1e-5
    assert by_layer[Layer("linear", "model.layers.1.mlp.up_proj")].error > 1e-3


def test_own_error_is_that_of_the_rounded_weight() -> None:
    """The first q_proj, computed apart: the same input times the rounded weight."""
    reference, _ = both("llama", find_recipe("int4-wo"))
    layer = Layer("linear", "model.layers.0.self_attn.q_proj")
    node = layers_of(reference)[layer]
    (step, _) = next(steps(WINDOW, chunk=len(WINDOW), block_size=16))
    program = copy_program(reference)
    x = next(each for each in program.graph.nodes if each.name == node.name).args[0]
    program.graph.output_node().args = (x,)
    inputs = torch.from_numpy(Runner(program, hold=False).forward(step))
    weight = reference.weights[node.args[1].name].load()
    scheme = find_recipe("int4-wo").linear
    assert isinstance(scheme, WeightOnly)
    rounded = quantize_blocks(weight, scheme, name="w").dequantize()
    y, other = inputs @ weight.T, inputs @ rounded.T
    found = {each.layer: each for each in errors("llama", find_recipe("int4-wo")).errors}[layer]
    assert found.own == pytest.approx(float((other - y).norm() / y.norm()), rel=1e-4)


def test_a_layer_that_one_program_lacks_is_listed() -> None:
    reference, candidate = both("llama", find_recipe("none"))
    name = next(name for name, expr in reference.weights.items() if any("0.mlp.down" in s for s in expr.sources()))
    reference.weights[name] = Constant(reference.weights[name].load())
    found = layer_errors(Runner(reference, hold=False), Runner(candidate, hold=False), WINDOW)
    assert set(found.unmatched) == {Layer("linear", name), Layer("linear", "model.layers.0.mlp.down_proj")}


def test_outputs_by_hand() -> None:
    layer = Layer("linear", "w")
    y = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 5.0]])
    other = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 5.0]])
    found = compare_outputs(layer, y, other, y)
    assert found.error == pytest.approx(3 / 50**0.5)
    assert (found.own, found.worst_token) == (0.0, 2)
    assert found.worst_error == pytest.approx(3 / 5)
    assert found.cosine == pytest.approx(50 / (50**0.5 * 59**0.5))
    zero = torch.zeros(2, 2)
    assert compare_outputs(layer, zero, zero, zero)[1:] == (0.0, 0.0, 1.0, 0.0, 0)
    found = compare_outputs(layer, zero, torch.ones(2, 2), zero)
    assert (found.error, found.cosine, found.worst_token) == (float("inf"), 0.0, 0)


def test_names_of_several_tensors() -> None:
    class Named(Constant):
        def sources(self) -> frozenset[str]:
            return frozenset(names)

    expr = Named(torch.zeros(1))
    names = ["a.b.weight"]
    assert tensors_name(expr, "x") == "a.b"
    names = []
    assert tensors_name(expr, "x") == "x"
    names = ["l.0.q.weight", "l.0.k.weight"]
    assert tensors_name(expr, "x") == "l.0.{k,q}"
    names = [f"l.experts.{i}.up.weight" for i in range(8)]
    assert tensors_name(expr, "x") == "l.experts.*"
    assert tensors_name(Map(expr, lambda t: t, (1,), torch.float32, "id"), "x") == "l.experts.*"
