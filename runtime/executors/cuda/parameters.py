"""The bytes that a launch passes to its kernel: addresses and numbers, laid out as the kernel was compiled.

data      | q  8 bytes | k  8 bytes | n 4 | stride 4 | scratch 8 | scratch 8 |      offsets: cubin.Parameter
pointers  |  &q  |  &k  |  &n  |  &stride  |  &scratch  |  &scratch  |               what cuLaunchKernelEx takes
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from llmbuild.engine.cubin import Launch, Parameter
from llmbuild.engine.expressions import parse
from llmbuild.engine.launch_plan import DAMAGED, Argument, Number, Place
from llmbuild.errors import EngineError, LLMBuildError

FLOATS = {"fp32": "<f", "fp64": "<d"}
Sizes = Callable[[str], int]


class Variable(NamedTuple):
    """A number that depends on the step."""

    parameter: Parameter
    text: str


class ParameterBuffer:
    """The parameters of one launch. data: uint8 [bytes]. pointers: address of the array of addresses of each.

    Numbers that depend on the step are written by `update`; all else is there from the start.

    Args:
        name: The kernel's, for errors.
        arguments: In the order of the kernel's parameters, scratch pointers left out.
        address: Address of a place on the GPU.
        scratch: Address for the first scratch pointer; 0 when the kernel needs none.

    Raises:
        EngineError: The arguments do not fit the parameters, or are of a kind that is not supported yet.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        arguments: Sequence[Argument],
        address: Callable[[Place], int],
        scratch: int = 0,
    ) -> None:
        self._name = name
        check_arguments(name, launch, arguments)
        parameters = launch.parameters
        size = max((p.offset + p.size for p in parameters), default=0)
        self.data = np.zeros(max(size, 1), np.uint8)
        base = self.data.ctypes.data
        self._pointers = np.array([base + p.offset for p in parameters], np.uint64)
        self.pointers: int = self._pointers.ctypes.data
        self._view = self.data.data
        self.variables: list[Variable] = []

        scratches = [scratch, 0]
        given = iter(arguments)
        for parameter in parameters:
            if parameter.kind == "scratch":
                self._write(parameter, scratches.pop(0))
                continue
            argument = next(given)
            if isinstance(argument, Place):
                self._write(parameter, address(argument))
            elif parse(argument.value).names:
                self.variables.append(Variable(parameter, argument.value))
            else:
                self._write(parameter, parse(argument.value).evaluate({}))

    def update(self, sizes: Sizes) -> None:
        """Write the numbers that depend on the step.

        Raises:
            LLMBuildError: A number does not fit its parameter.
        """
        for parameter, text in self.variables:
            self._write(parameter, sizes(text))

    def _write(self, parameter: Parameter, value: int) -> None:
        at, size, kind = parameter.offset, parameter.size, parameter.kind
        if kind in FLOATS:
            struct.pack_into(FLOATS[kind], self._view, at, value)
            return
        try:
            self._view[at : at + size] = value.to_bytes(size, "little", signed=kind.startswith("i"))
        except OverflowError:
            raise LLMBuildError(
                f"{value} does not fit the parameter {parameter.name} ({kind})", where=f"kernel {self._name}"
            ) from None


def check_arguments(name: str, launch: Launch, arguments: Sequence[Argument]) -> None:
    """Check that a plan's arguments are what a kernel takes.

    Raises:
        EngineError: More or fewer, an address for a number or the reverse, or a kind that is not supported yet.
    """
    where = f"kernel {name}"
    if launch.tensor_maps or any(p.kind == "tensormap" for p in launch.parameters):
        raise EngineError(
            "the kernel takes tensor maps, which this version cannot make",
            where=where,
            hint="convert the model again with this version of llmbuild",
        )
    taken = [parameter for parameter in launch.parameters if parameter.kind != "scratch"]
    if len(taken) != len(arguments):
        raise EngineError(
            f"the kernel takes {len(taken)} arguments, the launch plan gives {len(arguments)}",
            where=where,
            hint=DAMAGED,
        )
    if len(launch.parameters) - len(taken) > 2:
        raise EngineError("the kernel takes more than two scratch pointers", where=where, hint=DAMAGED)
    for parameter, argument in zip(taken, arguments, strict=True):
        if parameter.kind.startswith("*") != isinstance(argument, Place):
            given = "a number" if isinstance(argument, Number) else "an address"
            raise EngineError(
                f"the parameter {parameter.name} is {parameter.kind}, the launch plan gives {given}",
                where=where,
                hint=DAMAGED,
            )
        if parameter.kind[0] not in "*iu" and parameter.kind not in FLOATS:
            raise EngineError(
                f"the parameter {parameter.name} is {parameter.kind}, which no number of a plan can be",
                where=where,
                hint=DAMAGED,
            )
