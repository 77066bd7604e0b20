"""Sizes that depend on the step, as text: `cdiv(T, 16)`. Parsed once, evaluated with integers, nothing else is legal.

Names: T tokens, B sequences, L rows of logits, S the longest sequence of a step. Operators: + - * // % and unary
minus; functions: min, max, cdiv(a, b) = a / b rounded up.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from llmbuild.errors import EngineError

NAMES = ("T", "B", "L", "S")
MAX_LENGTH = 400  # a longer text is no size that the builder writes, and could nest too deeply to parse


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for b > 0."""
    return -(-a // b)


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: dict[str, Callable[..., int]] = {"min": min, "max": max, "cdiv": cdiv}


@dataclass(frozen=True)
class Expression:
    """A checked expression. names: those of NAMES that it uses."""

    text: str
    names: frozenset[str]
    tree: ast.expr

    def evaluate(self, values: Mapping[str, int]) -> int:
        """Return the value for `values`, which holds at least `names`.

        Raises:
            EngineError: A name has no value, or the expression divides by zero.
        """
        missing = sorted(self.names - values.keys())
        if missing:
            raise EngineError(f"the size {self.text!r} needs a value for {', '.join(missing)}")
        try:
            return _value(self.tree, values)
        except ZeroDivisionError:
            given = ", ".join(f"{name} = {values[name]}" for name in sorted(self.names))
            raise EngineError(f"the size {self.text!r} divides by zero", where=given or None) from None


@lru_cache(maxsize=4096)
def parse(text: str) -> Expression:
    """Check an expression.

    Raises:
        EngineError: It holds anything but integers, NAMES and the operators and functions above.
    """
    if len(text) > MAX_LENGTH:
        raise EngineError(f"a size of {len(text)} characters; {MAX_LENGTH} are the most", where=text[:60] + "...")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise EngineError(f"the size {text!r} is no expression: {error}") from None
    names: set[str] = set()
    _check(tree, text, names)
    return Expression(text, frozenset(names), tree)


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """Parse (cached) and evaluate; see `parse` and `Expression.evaluate` for the errors."""
    return parse(text).evaluate(values)


def _check(node: ast.expr, text: str, names: set[str]) -> None:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return
        case ast.Name(id=name) if name in NAMES:
            names.add(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            _check(left, text, names)
            _check(right, text, names)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, text, names)
        case ast.Call(func=ast.Name(id=function), args=args, keywords=[]) if function in FUNCTIONS:
            if len(args) < 2 or (function == "cdiv" and len(args) != 2):
                raise EngineError(f"the size {text!r} calls {function} with {len(args)} values")
            for argument in args:
                _check(argument, text, names)
        case _:
            raise EngineError(
                f"the size {text!r} holds {ast.unparse(node)!r}, which no size may",
                hint=f"names: {', '.join(NAMES)}; operators: + - * // %; functions: {', '.join(FUNCTIONS)}",
            )


def _value(node: ast.expr, values: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.UnaryOp(operand=operand):
            return -_value(operand, values)
        case ast.Call(func=ast.Name(id=function), args=args):
            return FUNCTIONS[function](*(_value(argument, values) for argument in args))
    raise AssertionError(f"{ast.dump(node)} was not refused by _check")
