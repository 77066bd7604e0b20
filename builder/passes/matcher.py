"""Patterns over the graph: commutative, looking through float casts, with captures.

    SQUARE = OneOf((pow_(Value("x"), 2), mul(Value("x"), Value("x"))))
    for found in match(SQUARE, node): found["x"]

A repeated name must bind the same value (casts aside). Matching backtracks over commutative orders and alternatives,
so every way to match is tried. Looking through casts is sound for our rewrites because the canonical ops compute in
float32: a rewrite may raise the precision of an intermediate, never lower it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.passes.edit import arg, arguments, axis, describe, dtype, is_call, is_tensor, rank, replace, size

aten = torch.ops.aten
Bindings = dict[str, Any]
CAST = aten.to.dtype  # `cleanup` turns every other cast into this one


@dataclass(frozen=True)
class Value:
    """Any tensor value, captured as it is (a cast is captured, not looked through)."""

    name: str


@dataclass(frozen=True)
class Number:
    """A Python number, captured."""

    name: str


@dataclass(frozen=True)
class Anything:
    """Any argument, not captured; for what a rewrite checks by the shape of the result."""


@dataclass(frozen=True)
class Axis:
    """An axis argument, or a list of one, that equals `index` for the rank of the call's first argument."""

    index: int


@dataclass(frozen=True)
class Call:
    """A call of one of `targets`. Arguments beyond the given patterns must have their schema defaults."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    commutative: bool = False


@dataclass(frozen=True)
class OneOf:
    patterns: tuple[Any, ...]


@dataclass(frozen=True)
class Channels:
    """Channels `begin` .. `begin + width` of a value's last axis, taken by slice or split; captures all three.

    Args:
        source: Name that captures the sliced value.
        part: Name that captures `(begin, end, step)`.
    """

    source: str
    part: str


class Declined(Exception):
    """Raised by a rewrite that must not fire; the text says why, with the offending value."""


def strip_casts(value: Any) -> Any:
    """Return what float-to-float casts were applied to."""
    while is_call(value, CAST) and dtype(value).is_floating_point and dtype(arg(value, 0)).is_floating_point:
        value = arg(value, 0)
    return value


def value_of_dtype(value: fx.Node, wanted: torch.dtype) -> fx.Node:
    """Return `value`, or what it was cast from, in the dtype `wanted`: the operand of an op that keeps its dtype.

    Raises:
        Declined: neither has that dtype.
    """
    for candidate in (strip_casts(value), value):
        if dtype(candidate) == wanted:
            return candidate
    raise Declined(f"the result is {str(wanted).removeprefix('torch.')}, the operand {describe(value)}")


def same(a: Any, b: Any) -> bool:
    a, b = strip_casts(a), strip_casts(b)
    return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and bool(a == b))


def match(pattern: Any, value: Any, bound: Bindings | None = None) -> Iterator[Bindings]:
    """Yield every way in which `pattern` matches `value`, as name -> captured value."""
    bound = {} if bound is None else bound
    if isinstance(pattern, (Value, Number)):
        if is_tensor(value) if isinstance(pattern, Value) else is_number(value):
            yield from bind(pattern.name, value, bound)
    elif isinstance(pattern, Anything):
        yield bound
    elif isinstance(pattern, OneOf):
        for alternative in pattern.patterns:
            yield from match(alternative, value, bound)
    elif isinstance(pattern, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(pattern):
            yield from match_all(pattern, value, bound)
    elif isinstance(pattern, Channels):
        taken = channels(strip_casts(value))
        if taken is not None:
            for inner in bind(pattern.source, taken[0], bound):
                yield from bind(pattern.part, taken[1:], inner)
    elif isinstance(pattern, Call):
        yield from match_call(pattern, strip_casts(value), bound)
    elif not isinstance(value, fx.Node) and type(value) in (int, float, str, bool, type(None)) and value == pattern:
        yield bound


def match_call(pattern: Call, node: Any, bound: Bindings) -> Iterator[Bindings]:
    if not is_call(node, *pattern.targets):
        return
    values = arguments(node)
    count = len(pattern.args)
    schema = node.target._schema.arguments
    if any(value != arg.default_value for value, arg in zip(values[count:], schema[count:], strict=True)):
        return
    wanted: list[Any] = []
    given: list[Any] = []
    for sub, value in zip(pattern.args, values, strict=False):
        if isinstance(sub, Axis):
            if not is_axis(value, sub.index, rank(arg(node, 0)) if is_tensor(arg(node, 0)) else rank(node)):
                return
        else:
            wanted.append(sub)
            given.append(value)
    yield from match_all(wanted, given, bound)
    if pattern.commutative:
        yield from match_all(wanted, given[::-1], bound)


def match_all(patterns: Sequence[Any], values: Sequence[Any], bound: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for inner in match(patterns[0], values[0], bound):
        yield from match_all(patterns[1:], values[1:], inner)


def bind(name: str, value: Any, bound: Bindings) -> Iterator[Bindings]:
    if name not in bound:
        yield {**bound, name: value}
    elif same(bound[name], value):
        yield bound


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_axis(value: Any, index: int, of_rank: int) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return len(values) == 1 and isinstance(values[0], int) and axis(values[0], of_rank) == axis(index, of_rank)


def channels(node: Any) -> tuple[fx.Node, int, int, int] | None:
    """Return (source, begin, end, step) when `node` takes channels of its source's last axis, else None."""
    if is_call(node, aten.slice.Tensor):
        source, dim, begin, end, step = arguments(node)
        width = size(source)[-1]
        if axis(dim, rank(source)) != rank(source) - 1 or not isinstance(width, int):
            return None
        begin, end, step = slice(begin, end, step).indices(width)
        return source, begin, end, step
    if isinstance(node, fx.Node) and node.args and is_call(arg(node, 0), aten.split_with_sizes.default):
        source, sizes, dim = arguments(arg(node, 0))
        index = arg(node, 1)
        if axis(dim, rank(source)) != rank(source) - 1 or not isinstance(index, int):
            return None
        return source, sum(sizes[:index]), sum(sizes[: index + 1]), 1
    return None


def add(a: Any, b: Any) -> Call:
    return Call((aten.add.Tensor, aten.add.Scalar), (a, b), commutative=True)


def sub(a: Any, b: Any) -> Call:
    return Call((aten.sub.Tensor, aten.sub.Scalar), (a, b))


def mul(a: Any, b: Any) -> Call:
    return Call((aten.mul.Tensor, aten.mul.Scalar), (a, b), commutative=True)


def neg(a: Any) -> OneOf:
    return OneOf((Call((aten.neg.default,), (a,)), mul(a, -1)))


def pow_(a: Any, exponent: Any) -> Call:
    return Call((aten.pow.Tensor_Scalar,), (a, exponent))


def square(name: str) -> OneOf:
    x = Value(name)
    return OneOf((pow_(x, 2), mul(x, x), Call((aten.square.default,), (x,))))


def mean_last(a: Any) -> Call:
    return Call((aten.mean.dim,), (a, Axis(-1), True))


RewriteOne = Callable[[Program, fx.Node, Bindings], fx.Node]


def rewrite_all(program: Program, name: str, pattern: Any, rewrite: RewriteOne) -> Rewrite:
    """Apply a rule wherever `pattern` matches, latest nodes first.

    `rewrite(program, root, bindings)` inserts the replacement before `root` and returns it, or raises `Declined`.
    Latest first, so that a cast applied to a pattern's result is tried as the root before the pattern itself.
    """
    log = Rewrite(name, 0)
    gone: set[fx.Node] = set()
    for node in reversed(list(program.graph.nodes)):
        if node in gone or node.op != "call_function":
            continue
        reasons: dict[str, None] = {}
        for found in match(pattern, node):
            try:
                new = rewrite(program, node, found)
            except Declined as reason:
                reasons[str(reason)] = None
                continue
            gone.update(replace(node, new))
            log.count += 1
            reasons.clear()
            break
        log.declined.extend(f"{node.name}: {reason} [{source_line(node)}]" for reason in reasons)
    return log
