"""How a launch passes a kernel's arguments: derived from the signature, then compared with what was compiled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmbuild.engine.cubin import Parameter, TensorMap
from llmbuild.errors import LLMBuildError
from llmbuild.plugins.kernels.spec import DESCRIPTOR, SCALARS

POINTER_SIZE = 8
MAP_SIZE, MAP_ALIGNMENT = 128, 64
ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\((.*?)\)", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+(\.ptr\s[^,]*?)?\w+(?:\[(\d+)\])?")


class Shape(NamedTuple):
    """What a parameter looks like in PTX. group: "pointer", "float", "integer" or "bytes" (a tensormap)."""

    size: int
    alignment: int
    group: str


def launch_parameters(signature: Mapping[str, str], tensor_maps: Sequence[TensorMap]) -> tuple[Parameter, ...]:
    """Return the parameters of a kernel compiled by Triton 3.6, in order, the two scratch pointers last.

    Args:
        signature: Triton type of each argument that is no constant.
        tensor_maps: One for each tensor descriptor, in order; empty where descriptors become pointers (SM < 90).
    """
    kinds: list[tuple[str, str]] = []
    maps = list(tensor_maps)
    for name, kind in signature.items():
        descriptor = DESCRIPTOR.fullmatch(kind)
        if descriptor is None:
            kinds.append((name, kind))
            continue
        axes = range(descriptor[2].count(",") + 1)
        if tensor_maps:
            maps.pop(0)
            kinds.append((f"{name}.map", "tensormap"))
        else:
            kinds.append((f"{name}.base", f"*{descriptor[1]}"))
            kinds += [(f"{name}.shape{axis}", "i64") for axis in axes]
            kinds += [(f"{name}.stride{axis}", "i64") for axis in axes]
            kinds.append((f"{name}.nan", "i1"))
        kinds += [(f"{name}.shape{axis}", "i32") for axis in axes]
        kinds += [(f"{name}.stride{axis}", "i64") for axis in axes]
    if maps:
        raise LLMBuildError(f"the compiler made {len(tensor_maps)} tensor maps, the signature has fewer descriptors")
    kinds += [("global_scratch", "scratch"), ("profile_scratch", "scratch")]
    return place(kinds)


def place(kinds: Sequence[tuple[str, str]]) -> tuple[Parameter, ...]:
    """Lay parameters out one after the other, each aligned."""
    placed = []
    offset = 0
    for name, kind in kinds:
        size = size_of(kind)
        alignment = MAP_ALIGNMENT if kind == "tensormap" else size
        offset = -(-offset // alignment) * alignment
        placed.append(Parameter(name=name, kind=kind, offset=offset, size=size))
        offset += size
    return tuple(placed)


def size_of(kind: str) -> int:
    """Bytes of a parameter of this kind."""
    if kind == "tensormap":
        return MAP_SIZE
    return POINTER_SIZE if kind == "scratch" or kind.startswith("*") else SCALARS[kind]


def shape_of(parameter: Parameter) -> Shape:
    """Return what a derived parameter should look like in PTX."""
    if parameter.kind == "tensormap":
        return Shape(MAP_SIZE, MAP_ALIGNMENT, "bytes")
    if parameter.kind == "scratch" or parameter.kind.startswith("*"):
        return Shape(POINTER_SIZE, POINTER_SIZE, "pointer")
    return Shape(parameter.size, parameter.size, "float" if parameter.kind.startswith("fp") else "integer")


def check_parameters(parameters: Sequence[Parameter], ptx: str, *, kernel: str) -> None:
    """Compare the derived parameters with the `.param` list of the compiled kernel.

    Raises:
        LLMBuildError: Their number, a size, an alignment or a group differs: arguments are passed in another way.
    """
    compiled = ptx_parameters(ptx)
    if len(compiled) != len(parameters):
        raise LLMBuildError(
            f"{kernel} was compiled with {len(compiled)} parameters, {len(parameters)} were derived", where="PTX .param"
        )
    for parameter, found in zip(parameters, compiled, strict=True):
        expected = shape_of(parameter)
        if found != expected:
            raise LLMBuildError(
                f"{kernel}: parameter {parameter.name} ({parameter.kind}) was derived as {_say(expected)}, "
                f"compiled as {_say(found)}",
                where="PTX .param",
            )


def _say(shape: Shape) -> str:
    return f"{shape.group} of {shape.size} bytes aligned to {shape.alignment}"


def ptx_parameters(ptx: str) -> list[Shape]:
    """Return what each parameter of the one kernel in a PTX text looks like."""
    entries = ENTRY.findall(ptx)
    if len(entries) != 1:
        raise LLMBuildError(f"{len(entries)} kernels in one PTX text", where="PTX .entry")
    found = []
    for text in entries[0][1].split(",\n") if entries[0][1].strip() else []:
        match = PARAMETER.fullmatch(text.strip())
        if match is None:
            raise LLMBuildError(f"a parameter that is not understood: {text.strip()!r}", where="PTX .param")
        alignment, kind, bits, pointer, count = match.groups()
        size = int(bits) // 8 * int(count or 1)
        group = "pointer" if pointer else "bytes" if count else "float" if kind == "f" else "integer"
        found.append(Shape(size, int(alignment or size), group))
    return found
