"""rope: every spelling, the proof that tables are doubled, and near misses."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.passes.cse import cse
from llmbuild.builder.passes.rope import rope
from support.small_programs import count, random, result, small_program

HALF = random(4, seed=2).abs() + 0.1  # inverse frequencies of 8 rotated channels


def run(body, **weights):
    program = small_program(body, inv_freq=HALF, **weights)
    before = result(program)
    cleanup(program)
    cse(program)
    log = rope(program)
    cleanup(program)
    torch.testing.assert_close(result(program), before, atol=1e-5, rtol=1e-5)
    return program, log


def angles(p, inv_freq):
    return p[:, None].float() * inv_freq


def doubled(p, inv_freq, scale=1.0):
    emb = torch.cat((angles(p, inv_freq),) * 2, dim=-1)
    return emb.cos() * scale, emb.sin() * scale


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def heads(x):
    return x.reshape(-1, 2, 8)


def half_token_major(x, p, f):
    cos, sin = (t.unsqueeze(1) for t in doubled(p, f))
    return heads(x) * cos + rotate_half(heads(x)) * sin


def half_head_major(x, p, f):
    cos, sin = doubled(p, f, scale=1.5)
    q = heads(x).transpose(0, 1)
    return ((q * cos) + (rotate_half(q) * sin)).transpose(0, 1)


def interleaved(x, p, f):
    cos, sin = (t.repeat_interleave(2, dim=-1)[:, None] for t in (angles(p, f).cos(), angles(p, f).sin()))
    return heads(x) * cos + rotate_pairs(heads(x)) * sin


def half_width(x, p, f):
    cos, sin = angles(p, f).cos()[:, None], angles(p, f).sin()[:, None]
    a, b = heads(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def partial(x, p, f):
    cos, sin = (t[:, None] for t in doubled(p, f))
    q = x.reshape(-1, 1, 16)
    turned, rest = q[..., :8], q[..., 8:]
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)


def partial_of_everything(x, p, f):
    cos, sin = (t[:, None] for t in doubled(p, f))
    q = heads(x)
    turned, rest = q[..., :8], q[..., 8:]
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)


@pytest.mark.parametrize(
    ("body", "is_interleaved"),
    [
        (half_token_major, False),
        (half_head_major, False),
        (interleaved, True),
        (half_width, False),
        (partial, False),
        (partial_of_everything, False),
    ],
)
def test_every_spelling_becomes_one_op_on_half_width_tables(body, is_interleaved) -> None:
    program, log = run(body)
    assert (log.count, log.declined) == (1, [])
    node = next(node for node in program.graph.nodes if "rope" in str(node.target))
    assert node.args[3] is is_interleaved
    assert node.args[1].meta["val"].shape[-1] == node.args[2].meta["val"].shape[-1] == 4
    for gone in ("cat", "stack", "neg", "transpose", "repeat_interleave"):
        assert count(program, gone) == 0, gone


def wrong_tables(x, p, f):
    emb = torch.cat((angles(p, f), angles(p, f) * 2), dim=-1)
    return heads(x) * emb.cos()[:, None] + rotate_half(heads(x)) * emb.sin()[:, None]


def interleaved_tables_for_halves(x, p, f):
    cos, sin = (t.repeat_interleave(2, dim=-1)[:, None] for t in (angles(p, f).cos(), angles(p, f).sin()))
    return heads(x) * cos + rotate_half(heads(x)) * sin


def turned_the_other_way(x, p, f):
    cos, sin = (t[:, None] for t in doubled(p, f))
    q = heads(x)
    return q * cos + torch.cat((-q[..., :4], q[..., 4:]), dim=-1) * sin


def quarters(x, p, f):
    cos, sin = (t[:, None] for t in doubled(p, f))
    q = heads(x)
    return q * cos + torch.cat((-q[..., 2:], q[..., :2]), dim=-1) * sin


def another_value(x, p, f):
    cos, sin = (t[:, None] for t in doubled(p, f))
    return (heads(x) + 1) * cos + rotate_half(heads(x)) * sin


def tables_per_head(x, p, f, w):
    cos, sin = (t[:, None] * w for t in doubled(p, f))
    return heads(x) * cos + rotate_half(heads(x)) * sin


def no_heads(x, p, f):
    cos, sin = doubled(p, f)
    return x[:, :8] * cos + rotate_half(x[:, :8]) * sin


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (wrong_tables, "is not proven to hold each value twice"),
        (interleaved_tables_for_halves, "is not proven to hold each value twice"),
        (turned_the_other_way, "pairs channels (4, 8, 1) with (0, 4, 1)"),
        (quarters, "pairs channels (0, 2, 1) with (2, 8, 1)"),
        (another_value, "no rotation was recognised"),
        (no_heads, "is not [..., heads, channels]"),
    ],
)
def test_near_misses_are_declined_with_the_offending_value(body, reason) -> None:
    program, log = run(body)
    assert log.count == 0 and count(program, "rope") == 0
    assert any(reason in line for line in log.declined), log.declined


def test_tables_that_differ_from_head_to_head_are_declined() -> None:
    _, log = run(tables_per_head, w=random(2, 8))
    assert log.count == 0 and any("differs from head to head" in line for line in log.declined), log.declined


def test_tables_are_halved_once_for_all_layers() -> None:
    def body(x, p, f):
        cos, sin = (t.unsqueeze(1) for t in doubled(p, f))
        q = heads(x)
        for _ in range(3):
            q = q * cos + rotate_half(q) * sin
        return q

    program, log = run(body)
    assert (log.count, count(program, "cos"), count(program, "sin")) == (3, 1, 1)
