"""What is compiled: a Triton function with the types, constants and options it is compiled for. Imports no Triton."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmbuild.engine.expressions import parse

Constant = int | float | bool | str | None
NAME = re.compile(r"[a-z][a-z0-9_]*")
SCALARS = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "fp32": 4, "fp64": 8}
ELEMENTS = {*SCALARS, "fp16", "bf16", "fp8e4nv", "fp8e5"}
DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[(\d+(?:, ?\d+)*)\]>")  # element type, sizes of a block
POINTER_TYPES = {  # what a kernel's pointer to a buffer of a dtype is called
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "int64": "*i64",
    "int32": "*i32",
    "int16": "*i16",
    "int8": "*i8",
    "uint8": "*u8",
    "bool": "*i1",
}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile.

    name: lower-case identifier, unique among the kernels of an engine.
    function: the `@triton.jit` function.
    signature: Triton type of each argument that is passed at launch, in the function's order: "*bf16", "i32", "fp32",
        "tensordesc<bf16[64, 128]>".
    constants: value of each other argument (`tl.constexpr`). An optional pointer that is absent is a constant None.
    divisible_by_16: arguments that are always multiples of 16 (pointers: in bytes). A promise: the compiler uses it.
    grid: programs along x, y, z, each an expression of `llmbuild.engine.expressions`.
    options: further options of Triton's CUDA compiler: launch_pdl, num_ctas, maxnreg.
    interpreted: what an interpreter runs instead, for kernels in Gluon, which has none: it computes the same from
        arguments of the same names. The function is `@gluon.jit` if, and only if, there is one.

    Raises:
        ValueError: An argument is missing, unknown, doubled or out of order, or a name or type is not legal.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Constant]
    divisible_by_16: tuple[str, ...] = ()
    grid: tuple[str, str, str] = ("1", "1", "1")
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, int | bool] = field(default_factory=dict)
    interpreted: KernelSpec | None = None

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ValueError(f"kernel {self.name!r}: {problem}")
        for expression in self.grid:
            parse(expression)

    @property
    def key(self) -> Hashable:
        """Equal for specs that compile to the same code; the name and the grid play no part in it."""
        return (
            self.function.fn,
            tuple(self.signature.items()),
            # repr: 1, 1.0 and True are equal and do not compile to the same code
            tuple(sorted((name, repr(value)) for name, value in self.constants.items())),
            tuple(sorted(self.divisible_by_16)),
            (self.num_warps, self.num_stages),
            tuple(sorted(self.options.items())),
        )

    def _problem(self) -> str | None:
        arguments = list(self.function.arg_names)
        given = {*self.signature, *self.constants}
        if not NAME.fullmatch(self.name):
            return "the name is no lower-case identifier"
        if both := sorted(self.signature.keys() & self.constants.keys()):
            return f"both passed and constant: {', '.join(both)}"
        if missing := [name for name in arguments if name not in given]:
            return f"arguments without type or value: {', '.join(missing)}"
        if unknown := sorted(given - set(arguments)):
            return f"no arguments of {self.function.fn.__name__}: {', '.join(unknown)}"
        if list(self.signature) != [name for name in arguments if name in self.signature]:
            return "the signature is not in the order of the function's arguments"
        if wrong := {name: kind for name, kind in self.signature.items() if not is_legal(kind)}:
            return f"not the types of arguments: {wrong}"
        if strange := [name for name in self.divisible_by_16 if not may_divide(self.signature.get(name, ""))]:
            return f"neither pointers nor integers that are passed, yet divisible: {', '.join(strange)}"
        if self.num_warps not in (1, 2, 4, 8, 16, 32) or self.num_stages < 1:
            return f"num_warps {self.num_warps} and num_stages {self.num_stages} cannot be"
        if self.function.is_gluon() != (self.interpreted is not None):
            return "kernels in Gluon, and no others, have one that is interpreted instead"
        if self.interpreted and (other := sorted(self.interpreted.signature.keys() - self.signature.keys())):
            return f"what is interpreted has other arguments: {', '.join(other)}"
        return None


def is_legal(kind: str) -> bool:
    """Whether a Triton type can be that of an argument: a scalar, a pointer to elements or a tensor descriptor."""
    if descriptor := DESCRIPTOR.fullmatch(kind):
        return descriptor[1] in ELEMENTS
    return kind in SCALARS or (kind.startswith("*") and kind[1:] in ELEMENTS)


def may_divide(kind: str) -> bool:
    return kind.startswith("*") or (kind in SCALARS and kind[0] in "iu" and kind != "i1")


def pointers(signature: Mapping[str, str]) -> tuple[str, ...]:
    """Return the arguments that are pointers: all buffers of an engine start at multiples of 256 bytes."""
    return tuple(name for name, kind in signature.items() if kind.startswith("*"))


def arguments_of(
    function: Any, types: Mapping[str, str], constants: Mapping[str, Constant]
) -> dict[str, Any]:  # fields of KernelSpec
    """Return signature, constants and divisible_by_16 of a spec: arguments with neither type nor value are None."""
    signature = {name: types[name] for name in function.arg_names if name in types}
    absent = dict.fromkeys(name for name in function.arg_names if name not in types and name not in constants)
    return {
        "signature": signature,
        "constants": {**constants, **absent},
        "divisible_by_16": pointers(signature),
    }
