"""A spec that could not be compiled, or would be compiled to something else, is refused when it is made."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llmbuild.errors import EngineError
from llmbuild.plugins.kernels.spec import KernelSpec, pointers


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@gluon.jit
def copy_in_gluon(x, y, n, BLOCK: gl.constexpr):
    i = gl.program_id(0)
    gl.store(y + i, gl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def scaled_copy(x, y, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    tl.store(y + i, tl.load(x + i, mask=i < n) * scale, mask=i < n)


SIGNATURE = {"x": "*fp32", "y": "*fp32", "n": "i32"}


def spec(**changes: Any) -> KernelSpec:
    values: dict[str, Any] = {"name": "copy", "function": copy, "signature": SIGNATURE, "constants": {"BLOCK": 64}}
    return KernelSpec(**(values | changes))


def scaled() -> KernelSpec:
    return spec(function=scaled_copy, signature=SIGNATURE | {"scale": "fp32"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Copy it"}, "kernel 'Copy it': the name is no lower-case identifier"),
        ({"constants": {}}, "arguments without type or value: BLOCK"),
        ({"constants": {"BLOCK": 64, "WIDTH": 1}}, "no arguments of copy: WIDTH"),
        ({"constants": {"BLOCK": 64, "n": 1}}, "both passed and constant: n"),
        ({"signature": {"y": "*fp32", "x": "*fp32", "n": "i32"}}, "not in the order of the function's arguments"),
        ({"signature": SIGNATURE | {"x": "*float"}}, r"not the types of arguments: \{'x': '\*float'\}"),
        ({"signature": SIGNATURE | {"x": "tensordesc<float[8]>"}}, "not the types of arguments"),
        ({"divisible_by_16": ("BLOCK",)}, "yet divisible: BLOCK"),
        ({"signature": SIGNATURE | {"n": "fp32"}, "divisible_by_16": ("n",)}, "yet divisible: n"),
        ({"num_warps": 3}, "num_warps 3"),
        ({"num_stages": 0}, "num_stages 0"),
        ({"interpreted": spec()}, "kernels in Gluon, and no others, have one that is interpreted instead"),
        ({"function": copy_in_gluon}, "kernels in Gluon, and no others, have one that is interpreted instead"),
        (
            {"function": copy_in_gluon, "interpreted": scaled()},
            "what is interpreted has other arguments: scale",
        ),
    ],
)
def test_wrong_specs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_wrong_grid() -> None:
    with pytest.raises(EngineError, match="holds 'X', which no size may"):
        spec(grid=("cdiv(X, 64)", "1", "1"))


def test_legal_kinds() -> None:
    made = spec(signature=SIGNATURE | {"x": "tensordesc<bf16[64, 128]>"}, divisible_by_16=("y", "n"))
    assert pointers(made.signature) == ("y",)


def test_the_key_tells_what_is_compiled_alike() -> None:
    assert spec().key == spec(name="other", grid=("T", "1", "1")).key
    different = [
        spec(constants={"BLOCK": 128}),
        spec(constants={"BLOCK": 64.0}),
        spec(divisible_by_16=("x",)),
        spec(num_warps=8),
        spec(num_stages=1),
        spec(options={"launch_pdl": True}),
        spec(signature=SIGNATURE | {"n": "i64"}),
    ]
    assert len({spec().key, *(other.key for other in different)}) == len(different) + 1
