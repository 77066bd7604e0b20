"""What a launch is given: parameter bytes against layouts written by hand, grids, and which ops run when."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmbuild.engine.cubin import Cubin, Launch, Parameter
from llmbuild.engine.launch_plan import Buffer, GemmOp, KernelOp, LaunchPlan, Place
from llmbuild.errors import EngineError, LLMBuildError
from llmbuild.runtime.executors.cuda.addresses import Addresses
from llmbuild.runtime.executors.cuda.parameters import ParameterBuffer
from llmbuild.runtime.executors.cuda.step_program import LoadedKernel, StepProgram, StepSizes, scratch_bytes
from support.cuda_engine import BATCH, TOKENS, gemm, kernel, launch, number, place, plan, small
from support.fake_device import FakeDevice

ADDRESSES = {"x": 0x7F12_3456_7800, "w": 0x8000_0000_0000_0000}


def address(at: Place) -> int:
    return ADDRESSES[at.name] + at.offset


def buffer(one: Launch, *arguments: Any, scratch: int = 0) -> ParameterBuffer:
    return ParameterBuffer("f", one, arguments, address, scratch)


def sizes(tokens: int = 7, sequences: int = 3, rows: int = 2, longest: int = 40) -> StepSizes:
    return StepSizes(tokens=tokens, sequences=sequences, rows=rows, longest=longest)


def test_bytes_equal_a_layout_written_by_hand() -> None:
    one = launch("f", "*bf16", "i32", "*fp32", "i64", "i8", "fp32")
    made = buffer(
        one,
        place("buffer", "x", 0x40),
        number("T * 1000 - 7001"),
        place("weight", "w", 3),
        number(1 << 40),
        number(-2),
        number(3),
        scratch=0x1122_3344_5566_7788,
    )
    made.update(sizes())
    assert made.data.tobytes() == bytes.fromhex(
        "4078563412 7f0000"  # x + 64, offset 0
        "ffffffff 00000000"  # -1, then padding up to the next pointer
        "0300000000000080"  # w + 3
        "0000000000010000"  # 2 ** 40
        "fe 000000"  # -2 in one byte, padding
        "00004040"  # 3.0
        "8877665544332211"  # global scratch
        "0000000000000000"  # profile scratch
    )
    made.update(sizes(tokens=8))
    assert made.data.tobytes()[8:12] == (999).to_bytes(4, "little")


def test_pointers_lead_to_each_parameter() -> None:
    one = launch("f", "i32", "*bf16")
    made = buffer(one, number(77), place("buffer", "x"))
    pointers = np.ctypeslib.as_array((ctypes.c_uint64 * 4).from_address(made.pointers))
    assert pointers.tolist() == [made.data.ctypes.data + offset for offset in (0, 8, 16, 24)]
    assert ctypes.c_int32.from_address(int(pointers[0])).value == 77
    assert ctypes.c_uint64.from_address(int(pointers[1])).value == ADDRESSES["x"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((place("buffer", "x"),), "the kernel takes 2 arguments, the launch plan gives 1"),
        ((place("buffer", "x"), number(1), number(2)), "the kernel takes 2 arguments, the launch plan gives 3"),
        ((number(1), number(1)), r"the parameter p0 is \*bf16, the launch plan gives a number"),
        ((place("buffer", "x"), place("weight", "w")), "the parameter p1 is i32, the launch plan gives an address"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(EngineError, match=text) as caught:
        buffer(launch("f", "*bf16", "i32"), *arguments)
    assert caught.value.where == "kernel f" and caught.value.hint is not None


def test_a_number_that_does_not_fit() -> None:
    made = buffer(launch("f", "i32"), number("T * 2000000000"))
    with pytest.raises(LLMBuildError, match=r"4000000000 does not fit the parameter p0 \(i32\)"):
        made.update(sizes(tokens=2))


def test_tensor_maps_are_refused() -> None:
    parameter = Parameter(name="x.map", kind="tensormap", offset=0, size=128)
    with pytest.raises(EngineError, match="takes tensor maps, which this version cannot make"):
        buffer(launch("f").model_copy(update={"parameters": (parameter,)}), number(1))


class Recorder:
    """A GEMM library that writes down what it is asked for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def add(self, op: GemmOp, address: Callable[[Place], int]) -> str:
        return op.label

    def prepare(self, gemm: str, rows: int, stream: Any) -> None:
        self.log.append((f"prepare {gemm}", rows))

    def run(self, gemm: str, rows: int, stream: Any) -> None:
        self.log.append((f"run {gemm}", rows))

    def save(self) -> None: ...


def program(*ops: KernelOp | GemmOp, grids: dict[str, tuple[str, str, str]], **changes: Any) -> Any:
    """Return (program, device, library) over kernels without parameters."""
    device, library = FakeDevice(), Recorder()
    made = plan(ops=ops, **changes)
    kernels = {name: LoadedKernel(Cubin(launch(name, "i32"), b""), name, grid) for name, grid in grids.items()}
    at = Addresses.of(made, arena=0, inputs={}, weights={"w": 0}, pools={})
    return StepProgram(made, device, kernels, at, library), device, library  # type: ignore[arg-type]


def test_grids_conditions_and_order() -> None:
    grids = {"a": ("cdiv(T, 4)", "B", "2"), "b": ("1", "1", "1"), "c": ("L", "1", "1"), "d": ("T - 7", "1", "1")}
    ops = (
        kernel("a", number("T")),
        kernel("b", number(1), when="decode"),
        kernel("c", number(1), when="mixed"),
        kernel("d", number(1)),
    )
    made, device, _ = program(*ops, grids=grids)
    made.run("mixed", sizes(tokens=7, rows=0), 0)
    assert [(one.symbol, tuple(one.grid)) for one in device.launched] == [("a", (2, 3, 2))], "empty grids are skipped"
    device.launched.clear()
    made.run("mixed", sizes(tokens=9, rows=2), 0)
    assert [(one.symbol, tuple(one.grid)) for one in device.launched] == [
        ("a", (3, 3, 2)),
        ("c", (2, 1, 1)),
        ("d", (2, 1, 1)),
    ]
    assert device.launched[0].parameters[:4] == (9).to_bytes(4, "little")
    device.launched.clear()
    made.run("decode", sizes(tokens=3), 0)
    assert [one.symbol for one in device.launched] == ["a", "b"]


def test_gemms_go_to_their_kernels_or_to_the_library() -> None:
    op = gemm(
        label="g",
        kernels=(small(1, kernel("one", number(1))), small(4, kernel("few", number("T")), kernel("sum", number(1)))),
    )
    buffers = tuple(
        Buffer(name=name, dtype="float32", size="T * 32", offset=0, first=0, last=3) for name in ("x", "out")
    )
    grids = dict.fromkeys(("one", "few", "sum"), ("1", "1", "1"))
    made, device, library = program(op, grids=grids, buffers=buffers)
    seen = []
    for rows in (1, 2, 4, 5, 0):
        made.prepare("mixed", sizes(tokens=rows), 0)
        made.run("mixed", sizes(tokens=rows), 0)
        seen.append([one.symbol for one in device.launched])
        device.launched.clear()
    assert seen == [["one"], ["few", "sum"], ["few", "sum"], [], []]
    assert library.log == [("prepare g", 5), ("run g", 5)]


def test_each_launch_that_needs_scratch_has_its_own() -> None:
    one = launch("a", "i32", global_scratch=128, global_scratch_align=128)
    grid = ("cdiv(T, 4)", "B", "1")
    loaded = LoadedKernel(Cubin(one, b""), "a", grid)
    made: LaunchPlan = plan(ops=(kernel("a", number(1)), kernel("a", number(2))))
    assert scratch_bytes(loaded, made.limits) == 128 * TOKENS // 4 * BATCH
    device = FakeDevice()
    at = Addresses.of(made, arena=0, inputs={}, weights={}, pools={})
    ready = StepProgram(made, device, {"a": loaded}, at, Recorder())  # type: ignore[arg-type]
    ready.run("mixed", sizes(), 0)
    first, second = (int.from_bytes(each.parameters[8:16], "little") for each in device.launched)
    assert first != second and {first, second} == set(device.blocks)
    ready.close()
    assert not device.blocks
