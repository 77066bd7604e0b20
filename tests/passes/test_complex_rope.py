"""Rotations written with complex numbers, or turned the other way, become `rope` and compute what they did."""

from __future__ import annotations

import torch

from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.passes.complex_rope import complex_rope
from llmbuild.builder.passes.cse import cse
from llmbuild.builder.passes.rope import rope
from support.small_programs import count, random, result, small_program

HALF = random(4, seed=2).abs() + 0.1  # inverse frequencies of 8 rotated channels


def run(body):
    program = small_program(body, inv_freq=HALF)
    before = result(program)
    logs = [apply(program) for apply in (complex_rope, cleanup, cse, rope)]
    torch.testing.assert_close(result(program), before, atol=1e-5, rtol=1e-5)
    return program, logs[0], logs[-1]


def table(p, inv_freq):
    angle = p[:, None].float() * inv_freq
    return torch.polar(torch.ones_like(angle), angle)


def as_complex_numbers(x, p, inv_freq):
    pairs = torch.view_as_complex(x.reshape(-1, 2, 4, 2))
    return torch.view_as_real(pairs * table(p, inv_freq)[:, None]).flatten(2)


def scaled_table(x, p, inv_freq):
    freqs = (table(p, inv_freq) * 1.25).unsqueeze(1)
    pairs = torch.view_as_complex(x.reshape(-1, 2, 8).reshape(-1, 2, 4, 2))
    return torch.view_as_real(freqs * pairs).flatten(2)


def backwards(x, p, inv_freq):
    emb = torch.cat((p[:, None].float() * inv_freq,) * 2, dim=-1)[:, None]
    q = x.reshape(-1, 2, 8)
    return q * emb.cos() + torch.cat((q[..., 4:], -q[..., :4]), dim=-1) * emb.sin()


def not_polar(x, p, inv_freq):
    numbers = torch.view_as_complex(torch.stack((x[:, :4], x[:, 4:8]), dim=-1))
    return torch.view_as_real(numbers * numbers).flatten(1)


def test_complex_rotations_fuse():
    for body in (as_complex_numbers, scaled_table):
        program, log, ropes = run(body)
        assert (log.count, ropes.count, count(program, "rope")) == (1, 1, 1), body.__name__
        assert not any("complex" in str(node.target) for node in program.graph.nodes)
        (node,) = [node for node in program.graph.nodes if "rope" in str(node.target)]
        assert node.args[3] is True  # interleaved


def test_a_rotation_the_other_way_is_one_by_the_opposite_angle():
    program, _, ropes = run(backwards)
    assert (ropes.count, count(program, "rope"), count(program, "neg")) == (1, 1, 1)


def test_other_complex_products_stay_with_a_reason():
    _, log, _ = run(not_polar)
    assert log.count == 0
    assert "not made by polar" in log.declined[0]
