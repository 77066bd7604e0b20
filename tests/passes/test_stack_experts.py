"""Weights of experts: one part an expert, in one layout, together in blocks or together plain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmbuild.builder.ir import Constant, Item, Stack, items
from llmbuild.builder.passes.quantize_weights import choose_formats, use_blocks
from llmbuild.builder.passes.stack_experts import stack_experts
from llmbuild.quantization.blocks import BlockTensor
from llmbuild.quantization.recipes import find_recipe
from support.small_programs import count, random, result, small_program

EXPERTS, HIDDEN, INNER, CHOICES = 4, 16, 24, 2


def body(x: Tensor, positions: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    scores, ids = torch.topk(torch.softmax(torch.nn.functional.linear(x, router), dim=-1), CHOICES)
    return torch.ops.llmbuild.moe_experts(x, ids, scores, up, down, None, None, "silu")


def rearranged(x: Tensor, positions: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows = torch.ops.llmbuild.expert_rows
    return body(x, positions, router, rows(up, True, True), rows(down, True, False))


def weights(transposed: bool = False) -> dict[str, Tensor]:
    up, down = random(EXPERTS, 2 * INNER, HIDDEN, seed=1) / 4, random(EXPERTS, HIDDEN, INNER, seed=2) / 4
    if transposed:
        up = up.unflatten(1, (2, INNER)).transpose(1, 2).flatten(1, 2)  # gate 0, up 0, gate 1, ...
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return {"router": random(EXPERTS, HIDDEN), "up": up, "down": down}


def test_layouts_become_one_and_the_result_stays() -> None:
    plain = result(small_program(body, **weights()))
    program = small_program(rearranged, **weights(transposed=True))
    torch.testing.assert_close(result(program), plain)
    log = stack_experts(program)
    assert (log.count, log.declined, count(program, "expert_rows")) == (2, [], 0)
    torch.testing.assert_close(result(program), plain)
    stacks = [expr for expr in program.weights.values() if isinstance(expr, Stack)]
    assert {stack.shape for stack in stacks} == {(EXPERTS, HIDDEN, INNER), (EXPERTS, 2 * INNER, HIDDEN)}


def test_what_is_not_a_weight_is_declined() -> None:
    program = small_program(lambda x, p, r, up, down: body(x, p, r, up * 2, down), vocab_size=0, **weights())
    log = stack_experts(program)
    assert log.count == 1 and "aten.mul.Tensor" in log.declined[0] and "is not a weight" in log.declined[0]
    assert choose_formats(program, find_recipe("int4-wo")).count == 0  # one of them alone stays plain


@pytest.mark.parametrize(("recipe", "close"), [("int8-wo", 0.01), ("int4-wo", 0.2)])
def test_experts_are_quantized_and_their_router_is_not(recipe: str, close: float) -> None:
    program = small_program(body, vocab_size=0, **weights())
    before = result(program)
    stack_experts(program)
    log = choose_formats(program, find_recipe(recipe))
    assert log.count == 2
    assert any("router" in reason and "chooses experts" in reason for reason in log.declined)
    rounded = result(program)
    assert 0 < (rounded - before).abs().max() < close * before.abs().max()
    assert use_blocks(program).count == 1
    assert (count(program, "moe_experts"), count(program, "moe_experts_blockwise")) == (0, 1)
    torch.testing.assert_close(result(program), rounded)


def test_one_excluded_weight_keeps_both_plain() -> None:
    class Named(Constant):
        def sources(self) -> frozenset[str]:
            return frozenset({"layer.experts.down"})

    program = small_program(body, vocab_size=0, **weights())
    down = next(name for name in program.weights if "down" in name)
    program.weights[down] = Named(program.weights[down].load())
    stack_experts(program)
    log = choose_formats(program, replace(find_recipe("int4-wo"), exclude=("*.down",)))
    assert log.count == 0
    assert use_blocks(program).count == 0
    assert count(program, "moe_experts") == 1


def test_a_stack_is_its_parts() -> None:
    whole = random(3, 4, 32)
    stack = Stack(items(Constant(whole)))
    assert all(isinstance(part, Item) for part in stack.parts)
    assert items(stack) is stack.parts
    assert torch.equal(stack.load(), whole)
    assert stack.block_format is None


def test_blocks_of_a_stack_are_those_of_its_parts_below_each_other() -> None:
    from llmbuild.quantization.expressions import Quantized

    scheme = find_recipe("int4-wo").linear
    parts = tuple(Quantized(Constant(random(8, 64, seed=seed)), scheme) for seed in range(3))
    blocks: BlockTensor = Stack(parts).load_blocks()
    assert Stack(parts).block_format == parts[0].block_format
    assert tuple(blocks.q.shape) == (24, 64)
    for index, part in enumerate(parts):
        rows = slice(8 * index, 8 * index + 8)
        assert torch.equal(blocks.dequantize()[rows], part.load_blocks().dequantize())
