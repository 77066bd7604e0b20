"""rms_norm, layer_norm and add_rms_norm: what they match, and the near misses that they must leave alone."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.passes.add_rms_norm import add_rms_norm
from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.passes.cse import cse
from llmbuild.builder.passes.fold_weights import fold_weights
from llmbuild.builder.passes.layer_norm import layer_norm
from llmbuild.builder.passes.rms_norm import rms_norm
from support.small_programs import count, random, result, small_program

W = random(16, seed=1)


def normalise(x, eps=1e-5, dim=-1):
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


def run(program, *passes):
    """Run passes and return their logs; what the program computes must stay."""
    before = result(program)
    logs = [each(program) for each in passes]
    torch.testing.assert_close(result(program), before, atol=1e-5, rtol=1e-5)
    return logs


SPELLINGS = {
    "weight first": lambda x, p, w: w * normalise(x),
    "weight last": lambda x, p, w: normalise(x) * w,
    "x*x": lambda x, p, w: w * (torch.rsqrt((x * x).mean(-1, True) + 1e-5) * x),
    "square": lambda x, p, w: w * (torch.rsqrt(1e-5 + x.square().mean([-1], True)) * x),
    "power": lambda x, p, w: w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** -0.5),
    "divided by a root": lambda x, p, w: w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "casts": lambda x, p, w: w * normalise(x.double()).float(),
}


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_rms_norm_is_found_in_every_spelling(body) -> None:
    program = small_program(body, w=W)
    _, log = run(program, cleanup, rms_norm)
    assert (log.count, log.declined, count(program, "rms_norm"), count(program, "mul")) == (1, [], 1, 0)
    norm = next(node for node in program.graph.nodes if "rms_norm" in str(node.target))
    assert norm.args[1].name == "w" and norm.args[2] == 1e-5


def test_offset_weights_are_folded_and_shared() -> None:
    program = small_program(lambda x, p, w: normalise(x) * (1 + w) + normalise(x + 1) * (1 + w), w=W)
    _, _, folded, log = run(program, cleanup, cse, fold_weights, rms_norm)
    assert (folded.count, log.count) == (1, 2)
    norms = [node for node in program.graph.nodes if "rms_norm" in str(node.target)]
    assert norms[0].args[1] is norms[1].args[1]
    torch.testing.assert_close(program.weights[norms[0].args[1].name].load(), W + 1)


NEAR_MISSES = {
    "mean over tokens": (lambda x, p, w: w * normalise(x, dim=0), "not the root of a mean square"),
    "sum, not mean": (lambda x, p, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, True) + 1e-5)), "not the root"),
    "third power": (lambda x, p, w: w * (x * torch.rsqrt(x.pow(4).mean(-1, True) + 1e-5)), "not the root"),
    "another value": (lambda x, p, w: w * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5)), "not the root"),
    "eps a tensor": (lambda x, p, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + w.abs().sum())), "not the root"),
    "eps scaled": (
        lambda x, p, w: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), w[0].abs(), alpha=2)),
        "not the root",
    ),
}


@pytest.mark.parametrize(("body", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_rms_norm_declines_near_misses(body, reason) -> None:
    program = small_program(body, w=W)
    _, log = run(program, cleanup, rms_norm)
    assert log.count == 0 and count(program, "rms_norm") == 0
    assert len(log.declined) == 1 and reason in log.declined[0] and "aten.rsqrt" in log.declined[0]


def test_a_factor_that_is_no_weight_stays_outside() -> None:
    program = small_program(lambda x, p: x.sigmoid() * normalise(x))
    _, log = run(program, cleanup, rms_norm)
    assert log.count == 1 and count(program, "mul") == 1
    assert "not a weight of 16 channels" in log.declined[0] and "sigmoid" in log.declined[0]


def test_a_weight_per_head_stays_outside() -> None:
    program = small_program(lambda x, p, w: w * normalise(x.reshape(-1, 2, 8)), w=random(2, 8))
    _, log = run(program, cleanup, rms_norm)
    assert log.count == 1 and "w placeholder [2, 8]" in log.declined[0]


def test_layer_norm_by_hand() -> None:
    def body(x, p, w):
        centred = x - x.mean(-1, keepdim=True)
        return w * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5))

    program = small_program(body, w=W)
    _, _, _, log = run(program, cleanup, cse, rms_norm, layer_norm)
    assert log.count == 1 and count(program, "layer_norm") == 1 and count(program, "sub") == 0


def test_layer_norm_needs_the_mean_of_the_same_value() -> None:
    def body(x, p, w):
        centred = x - x.sigmoid().mean(-1, keepdim=True)
        return w * normalise(centred)

    program = small_program(body, w=W)
    _, _, _, log = run(program, cleanup, cse, rms_norm, layer_norm)
    assert log.count == 0 and count(program, "rms_norm") == 1


def test_a_sum_is_taken_into_the_norm_and_kept_for_the_residual() -> None:
    def body(x, p, w):
        total = x + x.sigmoid()
        return w * normalise(total) - total

    program = small_program(body, w=W)
    _, _, log = run(program, cleanup, rms_norm, add_rms_norm)
    assert log.count == 1 and count(program, "add_rms_norm") == 1 and count(program, "add") == 0


SUMS = {
    "a number": (lambda x, w: x + 2.0, "the sum adds 2.0"),
    "a bias": (lambda x, w: x + w, "the terms differ"),
    "scaled": (lambda x, w: torch.add(x, x.sigmoid(), alpha=3), "scales its second term by 3"),
}


@pytest.mark.parametrize(("total", "reason"), SUMS.values(), ids=SUMS)
def test_add_rms_norm_declines_other_sums(total, reason) -> None:
    program = small_program(lambda x, p, w: w * normalise(total(x, w)), w=W)
    _, _, log = run(program, cleanup, rms_norm, add_rms_norm)
    assert log.count == 0 and reason in log.declined[0]
