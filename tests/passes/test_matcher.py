"""The pattern language: order, casts, captures, defaults."""

from __future__ import annotations

import torch

from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.passes.matcher import Channels, Number, OneOf, Value, add, match, mean_last, mul, pow_
from support.small_programs import random, small_program


def last(body, **weights):
    """The node that `body` returns."""
    program = small_program(body, **weights)
    cleanup(program)
    return next(node for node in program.graph.nodes if "index" in str(node.target)).args[0]


def found(pattern, node):
    return list(match(pattern, node))


def test_commutative_ops_match_in_both_orders() -> None:
    pattern = add(mul(Value("a"), 2), Value("b"))
    for body in (lambda x, p: x * 2 + x.sin(), lambda x, p: x.sin() + 2 * x):
        (bound,) = found(pattern, last(body))
        assert "embedding" in str(bound["a"].target) and "sin" in str(bound["b"].target)


def test_every_way_to_match_is_tried() -> None:
    node = last(lambda x, p: x.sin() * x.cos())
    ways = found(mul(Value("a"), Value("b")), node)
    assert {(str(way["a"].target), str(way["b"].target)) for way in ways} == {
        ("aten.sin.default", "aten.cos.default"),
        ("aten.cos.default", "aten.sin.default"),
    }


def test_a_repeated_name_is_one_value_casts_aside() -> None:
    pattern = mul(Value("x"), add(Value("x"), 1))
    assert found(pattern, last(lambda x, p: x * (x.double() + 1)))
    assert not found(pattern, last(lambda x, p: x * (x.sin() + 1)))


def test_integer_casts_are_not_looked_through() -> None:
    pattern = add(pow_(Value("x"), 2), 1)
    assert found(pattern, last(lambda x, p: x.pow(2).double() + 1))
    assert not found(pattern, last(lambda x, p: x.pow(2).int() + 1))


def test_other_arguments_must_be_defaults() -> None:
    pattern = add(Value("x"), Value("y"))
    assert found(pattern, last(lambda x, p: torch.add(x, x.sin())))
    assert not found(pattern, last(lambda x, p: torch.add(x, x.sin(), alpha=2)))
    assert not found(mean_last(Value("x")), last(lambda x, p: x.mean(-1, keepdim=False)))


def test_axes_match_however_they_are_written() -> None:
    for axes in (-1, 1, [1]):
        assert found(mean_last(Value("x")), last(lambda x, p, axes=axes: x.mean(axes, keepdim=True)))
    assert not found(mean_last(Value("x")), last(lambda x, p: x.mean([0, 1], keepdim=True)))


def test_numbers_bind_numbers_only() -> None:
    pattern = add(Value("x"), Number("n"))
    assert [way["n"] for way in found(pattern, last(lambda x, p: x + 0.25))] == [0.25]
    assert not found(pattern, last(lambda x, p, w: x + w, w=random(16)))


def test_channels_are_read_from_slices_and_splits() -> None:
    pattern = Channels("x", "part")
    for body, part in (
        (lambda x, p: x[:, 4:12], (4, 12, 1)),
        (lambda x, p: x[:, 1::2], (1, 16, 2)),
        (lambda x, p: x.split([4, 12], dim=-1)[1], (4, 16, 1)),
        (lambda x, p: x.chunk(2, dim=1)[0], (0, 8, 1)),
    ):
        (bound,) = found(pattern, last(body))
        assert bound["part"] == part and "embedding" in str(bound["x"].target)
    assert not found(pattern, last(lambda x, p: x[2:]))


def test_alternatives_are_all_yielded() -> None:
    node = last(lambda x, p: x.pow(2))
    assert len(found(OneOf((pow_(Value("x"), 2), pow_(Value("x"), Number("n")))), node)) == 2
