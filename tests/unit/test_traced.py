"""Programs that tests share by copies: what one test does to its copy, no other sees."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.recipes import find_recipe
from support.small_programs import small_step
from support.tiny_models import tiny_model
from support.traced import optimized, saved, traced


def picture(program: Program) -> tuple[object, ...]:
    """All that a pass could change: nodes with their values' kinds, weights and the log."""
    nodes = [(node.format_node(), str(node.meta.get("val"))) for node in program.graph.nodes]
    return nodes, dict(program.weights), [(each.name, each.count, list(each.declined)) for each in program.rewrites]


def logits(program: Program) -> torch.Tensor:
    return Oracle(program).run(small_step(), PagedState(num_blocks=4, block_size=8))


def test_passes_over_one_copy_leave_the_next_as_it_was() -> None:
    first = traced("gemma2")
    before, expected = picture(first), logits(first)
    optimize(first, find_recipe("int4-wo"))
    assert picture(first) != before
    assert picture(traced("gemma2")) == before
    assert torch.equal(logits(traced("gemma2")), expected)


def test_a_changed_program_leaves_the_optimised_one_as_it_was() -> None:
    first = optimized("gemma2")
    before = picture(first)
    name, other = list(first.weights)[:2]
    first.weights[name] = first.weights[other]
    first.rewrites.clear()
    node = next(node for node in first.graph.nodes if node.target is torch.ops.aten.linear.default)
    node.target, node.meta["val"] = torch.ops.aten.erfinv.default, None
    assert picture(first) != before
    assert picture(optimized("gemma2")) == before


def test_dtypes_and_configs_are_told_apart() -> None:
    assert str(traced("gpt2", dtype=torch.float16).weights) != str(traced("gpt2").weights)
    assert traced("gpt2", num_hidden_layers=1).info.num_layers == 1
    assert traced("gpt2").info.num_layers == 2
    assert saved("gpt2") == saved("gpt2") != saved("gpt2", num_hidden_layers=1)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral"])
def test_a_model_made_twice_has_the_same_weights(family: str) -> None:
    """Whatever was drawn before: sinks of gpt_oss begin as random numbers."""
    first, second = tiny_model(family).state_dict(), tiny_model(family).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
