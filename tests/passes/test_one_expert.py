"""Llama 4's products of all tokens with all experts become experts of which each token visits one."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.recipes import find_recipe
from support.small_programs import count, small_step
from support.traced import traced


def logits(program: Program) -> torch.Tensor:
    return Oracle(program).run(small_step(), PagedState(num_blocks=4, block_size=8))


def test_one_choice_a_token_is_one_expert_of_the_weighted_input() -> None:
    program = traced("llama4_text")
    before = logits(program)
    assert count(program, "bmm") == 2
    optimize(program, find_recipe("none"))
    assert (count(program, "bmm"), count(program, "moe_experts")) == (0, 1)
    assert next(rewrite.count for rewrite in program.rewrites if rewrite.name == "one_expert") == 1
    torch.testing.assert_close(logits(program), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choices", [2, 3])
def test_several_choices_are_left_as_they_are_and_said(choices: int) -> None:
    program = traced("llama4_text", num_experts_per_tok=choices)
    before = logits(program)
    optimize(program, find_recipe("none"))
    assert count(program, "moe_experts") == 0
    log = next(rewrite for rewrite in program.rewrites if rewrite.name == "one_expert")
    assert log.count == 0
    assert f"{choices} experts for each token, whose inputs differ" in log.declined[0]
    torch.testing.assert_close(logits(program), before, rtol=1e-5, atol=1e-5)
