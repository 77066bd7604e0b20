"""Mixtures of experts through all passes: nothing changes the result, and experts run on the rows asked for only."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.pipeline import optimize
from llmbuild.quantization.recipes import find_recipe
from support.parity import relative_error
from support.tiny_models import MOE_FAMILIES, tiny_model
from support.traced import traced

QUICK = ("qwen2_moe",)


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MOE_FAMILIES]
)
def test_passes_change_nothing(family: str) -> None:
    model = tiny_model(family)
    program = traced(family)
    wrong: list[str] = []

    def compare(name, program) -> None:
        if program.rewrites[-1].count and relative_error(program, model) > 2e-5:
            wrong.append(name)

    optimize(program, find_recipe("none"), after_pass=compare)
    assert wrong == []
    counts = {rewrite.name: rewrite.count for rewrite in program.rewrites}
    nodes = [node for node in program.graph.nodes if node.target is torch.ops.llmbuild.moe_experts.default]
    assert counts["stack_experts"] in (2 * len(nodes), 0)  # 0: the frontend stacked them already
    rows = program.placeholder("logits_indices").meta["val"].shape[0]
    assert str(nodes[-1].meta["val"].shape[0]) == str(rows)
