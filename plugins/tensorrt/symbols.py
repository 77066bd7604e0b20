"""Sizes of a launch, such as `T // 4 + B`, as expressions of TensorRT, which evaluates them in each step by itself."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import reduce
from typing import Any

from llmbuild.engine.expressions import parse

OPERATIONS: dict[type[ast.operator], str] = {
    ast.Add: "SUM",
    ast.Sub: "SUB",
    ast.Mult: "PROD",
    ast.FloorDiv: "FLOOR_DIV",
}
FUNCTIONS = {"min": "MIN", "max": "MAX", "cdiv": "CEIL_DIV"}


class Symbols:
    """Makes IDimensionExprs and ISymExprs.

    Args:
        trt: The bindings.
        builder: TensorRT's IExprBuilder, valid as long as the call that it was passed to.
        named: The expressions of T and B, as far as there are any.
    """

    def __init__(self, trt: Any, builder: Any, named: Mapping[Any, Any]) -> None:
        self._trt, self._builder, self._named = trt, builder, named

    def number(self, size: str | int) -> Any:
        """Return a size as an int32, ISymExpr: what grids and arguments are made of."""
        made = self._trt.ISymExpr()
        made.type, made.dtype = self._trt.PluginArgType.INT, self._trt.PluginArgDataType.INT32
        made.expr = self.dimension(size)
        return made

    def dimension(self, size: str | int) -> Any:
        """Return a size as an IDimensionExpr.

        Raises:
            EngineError: It is no expression.
            KeyError: It uses a size that the node's inputs do not have.
        """
        return self._builder.constant(size) if isinstance(size, int) else self._made(parse(size).tree)

    def _made(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as value):
                return self._builder.constant(value)
            case ast.Name(id=name):
                return self._named[name]
            case ast.BinOp(left=left, op=ast.Mod(), right=right):  # a - a // b * b: TensorRT has no remainder
                a, b = self._made(left), self._made(right)
                return self._do("SUB", a, self._do("PROD", self._do("FLOOR_DIV", a, b), b))
            case ast.BinOp(left=left, op=op, right=right):
                return self._do(OPERATIONS[type(op)], self._made(left), self._made(right))
            case ast.UnaryOp(operand=operand):
                return self._do("SUB", self._builder.constant(0), self._made(operand))
            case ast.Call(func=ast.Name(id=function), args=args):
                return reduce(lambda a, b: self._do(FUNCTIONS[function], a, b), map(self._made, args))
        raise AssertionError(f"{ast.dump(node)} was not refused by parse")

    def _do(self, operation: str, a: Any, b: Any) -> Any:
        return self._builder.operation(getattr(self._trt.DimensionOperation, operation), a, b)
