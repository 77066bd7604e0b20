"""canonical_linear, fold_weights, merge_linears, activation and gated_activation: matches and near misses."""

from __future__ import annotations

import math

import pytest
import torch

from llmbuild.builder.ir import Concat
from llmbuild.builder.passes.activation import activation
from llmbuild.builder.passes.canonical_linear import canonical_linear
from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.passes.cse import cse
from llmbuild.builder.passes.fold_weights import fold_weights
from llmbuild.builder.passes.gated_activation import gated_activation
from llmbuild.builder.passes.merge_linears import joined_name, merge_linears
from llmbuild.quantization.expressions import Quantized
from llmbuild.quantization.recipes import PerGroup, WeightOnly
from support.small_programs import count, random, result, small_program, targets

linear = torch.nn.functional.linear
SQUARE, WIDE = random(16, 16, seed=3), random(24, 16, seed=4)


def run(program, *passes):
    before = result(program)
    logs = [each(program) for each in passes]
    torch.testing.assert_close(result(program), before, atol=1e-5, rtol=1e-5)
    return logs


# ------------------------------------------------------------------------------------------------ linears
@pytest.mark.parametrize(
    "body",
    [
        lambda x, p, w, b: torch.addmm(b, x, w),
        lambda x, p, w, b: x @ w + b,
        lambda x, p, w, b: torch.mm(x, w) + b,
        lambda x, p, w, b: x @ w.t() + b,
    ],
    ids=["addmm", "matmul", "mm", "transposed"],
)
def test_products_with_a_weight_become_linears(body) -> None:
    program = small_program(body, w=SQUARE, b=SQUARE[0])
    _, log = run(program, cleanup, canonical_linear)
    assert log.count == 1 and count(program, "linear") == 1
    weight = next(node for node in program.graph.nodes if "linear" in str(node.target)).args[1]
    assert weight.op == "placeholder"


def test_a_transposed_weight_is_taken_back_not_transposed_twice() -> None:
    program = small_program(lambda x, p, w: x @ w, w=SQUARE)
    run(program, cleanup, canonical_linear)
    (name,) = [name for name in program.weights if name.startswith("w")]
    assert program.weights[name].load().equal(SQUARE.t())
    assert program.weights[name].label == "transpose(w)"


def test_products_of_activations_are_declined() -> None:
    program = small_program(lambda x, p: x @ (x.t() @ x))
    _, log = run(program, cleanup, canonical_linear)
    assert log.count == 0 and all("is not a weight matrix" in line for line in log.declined) and log.declined


def test_weight_arithmetic_is_done_at_build() -> None:
    program = small_program(lambda x, p, w: x * (w.float() * 2 + 1)[None].exp(), w=SQUARE[0])
    _, log = run(program, cleanup, fold_weights)
    assert log.count == 4 and count(program, "exp") == 0 and len(program.weights) == 2
    label = next(expr.label for name, expr in program.weights.items() if name != "table")
    assert label.startswith("exp.default(")


def test_folding_declines_what_would_cost() -> None:
    program = small_program(lambda x, p, w: x * w.expand(4, 16).sum(0), w=SQUARE[:1])
    (log,) = run(program, fold_weights)
    assert log.count == 0 and "would grow from 16 to 64 elements" in log.declined[0]
    program = small_program(lambda x, p, w: linear(x, w * 2), w=SQUARE)
    program.weights["w"] = Quantized(program.weights["w"], WeightOnly(8, PerGroup(8)))
    log = fold_weights(program)
    assert log.count == 0 and "is stored in blocks (int8 per group 8)" in log.declined[0]


# ------------------------------------------------------------------------------------------------ merging
def siblings(x, p, a, b, c):
    return torch.cat((linear(x, a), linear(x, b) * 2, linear(x, c)), dim=-1)


def test_siblings_become_one_linear_without_a_second_copy() -> None:
    program = small_program(siblings, a=SQUARE, b=WIDE, c=SQUARE + 1)
    _, log = run(program, cleanup, merge_linears)
    assert (log.count, count(program, "linear"), log.declined) == (1, 1, [])
    split = next(node for node in program.graph.nodes if "split" in str(node.target))
    assert split.args[1] == [16, 24, 16]
    assert set(program.weights) == {"table", "a_b_c"} and isinstance(program.weights["a_b_c"], Concat)


def test_missing_biases_become_zeros() -> None:
    program = small_program(lambda x, p, a, b, v: linear(x, a, v) * linear(x, b), a=SQUARE, b=SQUARE + 1, v=SQUARE[2])
    _, log = run(program, cleanup, merge_linears)
    assert log.count == 1
    assert program.weights["a_b_bias"].load().equal(torch.cat((SQUARE[2], torch.zeros(16))))


def test_only_what_is_stored_alike_is_merged() -> None:
    program = small_program(siblings, a=SQUARE, b=WIDE, c=SQUARE + 1)
    cleanup(program)
    for name, bits in (("a", 8), ("b", 4), ("c", 8)):
        program.weights[name] = Quantized(program.weights[name], WeightOnly(bits, PerGroup(8)))
    (log,) = run(program, merge_linears)
    assert log.count == 1 and set(program.weights) == {"table", "a_c", "b"}
    assert "stored differently" in log.declined[0]
    assert "int8 per group 8 (8 bits, blocks of 8, zero 128): linear, linear_2" in log.declined[0]
    merged = program.weights["a_c"].block_format
    assert merged is not None and merged.bits == 8


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x, p, a, b: linear(x, a) * linear(x, b * x.mean()), "is not a weight"),
        (lambda x, p, a, b: linear(x, a) + linear(x, b) + linear(x + 1, a), "a is used elsewhere too"),
        (lambda x, p, a, b: linear(x, a) * linear(x, b, x.sum(0)), "its bias"),
    ],
    ids=["computed weight", "shared weight", "computed bias"],
)
def test_linears_that_cannot_share_a_matrix_stay_apart(body, reason) -> None:
    program = small_program(body, a=SQUARE, b=WIDE[:16])
    _, log = run(program, cleanup, merge_linears)
    assert log.count == 0 and any(reason in line for line in log.declined), log.declined


def test_merged_names_say_what_was_merged() -> None:
    program = small_program(siblings, a=SQUARE, b=WIDE, c=SQUARE)
    nodes = [program.placeholder(name) for name in ("a", "b", "c")]
    for node, name in zip(
        nodes, ("l0_attn_q_proj_weight", "l0_attn_k_proj_weight", "l0_attn_v_proj_weight"), strict=True
    ):
        node.name = name
    assert joined_name(nodes) == "l0_attn_q_k_v_proj_weight"


# ------------------------------------------------------------------------------------------------ activations
def gelu_tanh(x, slope=math.sqrt(2 / math.pi), cubic=0.044715):
    return 0.5 * x * (1 + torch.tanh(slope * (x + cubic * x.pow(3))))


@pytest.mark.parametrize(
    ("body", "op"),
    [
        (lambda x, p: gelu_tanh(x), "gelu"),
        (lambda x, p: x * 0.5 * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))), "gelu"),
        (lambda x, p: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2))), "gelu"),
        (lambda x, p: x * torch.sigmoid(x), "silu"),
    ],
    ids=["tanh", "fast tanh", "erf", "silu"],
)
def test_activations_written_out_are_recognised(body, op) -> None:
    program = small_program(body)
    _, log = run(program, cleanup, activation)
    assert log.count == 1 and targets(program)[-2:-1] == [f"aten.{op}.default"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x, p: gelu_tanh(x, slope=0.8), "the slope is 0.8, not 0.797884561"),
        (lambda x, p: gelu_tanh(x, cubic=0.05), "the cubic coefficient is 0.05, not 0.044715"),
        (lambda x, p: x * 0.5 * (1.0 + torch.erf(x / 2)), "the slope is 0.5, not 0.707106781"),
    ],
)
def test_activations_with_other_constants_are_declined(body, reason) -> None:
    program = small_program(body)
    _, log = run(program, cleanup, activation)
    assert log.count == 0 and reason in log.declined[0]


functional = torch.nn.functional
GATES = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", GATES)
def test_gated_activations(name) -> None:
    program = small_program(lambda x, p: (x + 1) * GATES[name](x))
    _, log = run(program, cleanup, gated_activation)
    node = next(node for node in program.graph.nodes if "gated" in str(node.target))
    assert log.count == 1 and node.args[2] == name and count(program, "mul") == 0


def test_a_chunked_projection_is_gated_too() -> None:
    def body(x, p, w):
        gate, up = linear(x, w).chunk(2, dim=-1)
        return up * functional.silu(gate)

    program = small_program(body, w=WIDE)
    _, log = run(program, cleanup, gated_activation)
    assert log.count == 1
    assert [name.split(".")[1] for name in targets(program)] == [
        "embedding", "linear", "split_with_sizes", "gated_activation", "index",
    ]  # fmt: skip


def test_a_gate_of_another_shape_is_declined() -> None:
    program = small_program(lambda x, p: torch.sigmoid(x[:, :1]) * x)
    _, log = run(program, cleanup, gated_activation)
    assert log.count == 0 and "gate and up differ in shape" in log.declined[0]


def test_scaling_an_activation_is_not_gating() -> None:
    program = small_program(lambda x, p: functional.silu(x) * 2.0)
    _, _, log = run(program, cleanup, cse, gated_activation)
    assert (log.count, log.declined) == (0, [])
