"""Rows quantized by row programs and multiplied as 8-bit numbers: the plan in the interpreter against torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbuild.builder.ir import Program
from llmbuild.builder.passes.cleanup import cleanup
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.cuda.lowering import plan_program
from llmbuild.builder.targets.cuda.partition import Launch, partition
from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter
from llmbuild.engine.launch_plan import GemmOp
from llmbuild.errors import UnsupportedError
from support.plans import HARDWARE
from support.small_programs import random, result, small_program, small_step

OPS = torch.ops.llmbuild
LIMITS = Limits(max_batch_size=8, max_num_tokens=32, max_seq_len=64, block_size=8)
KINDS = {"float8": torch.float8_e4m3fn, "int8": torch.int8}


def weight(rows: int, columns: int, kind: torch.dtype, seed: int = 3) -> Tensor:
    return (random(rows, columns, seed=seed) * (30 if kind == torch.int8 else 2)).to(kind)


def product(x: Tensor, w: Tensor, w_scale: Tensor, scale: Tensor | None = None) -> Tensor:
    q, x_scale = OPS.quantize_rows(x, scale, w.dtype)
    return OPS.linear_scaled(q, w, x_scale, w_scale, None, [1, w.shape[1]], x.dtype)


def blocks(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """Scales of 16 channels each."""
    q, x_scale = OPS.quantize_rows(x.reshape(-1, x.shape[1] // 16, 16), None, w.dtype)
    q, x_scale = q.reshape(-1, w.shape[1]), x_scale.reshape(-1, x.shape[1] // 16)
    return OPS.linear_scaled(q, w, x_scale, w_scale, None, [16, 16], x.dtype)


def norm_and_sum(x: Tensor, p: Tensor, w: Tensor, s: Tensor, n: Tensor) -> Tensor:
    y, total = OPS.add_rms_norm(x, x * 2, n, 1e-5)
    return product(y, w, s) + total


def planned_result(small: Program, **hardware: Any) -> Tensor:
    planned = plan_program(small, LIMITS, dataclasses.replace(HARDWARE, **hardware))
    return torch.from_numpy(PlanInterpreter(planned, 8).forward(small_step()))


def programs(kind: torch.dtype) -> dict[str, Program]:
    square, scales = weight(16, 16, kind), torch.rand(16, 1, generator=torch.Generator().manual_seed(5)) + 0.1
    wide = weight(16, 48, kind, 4)
    norm = random(16, seed=1)
    every = {"w": square, "s": scales}
    return {
        "dynamic": small_program(lambda x, p, w, s: product(x, w, s), **every),
        "static": small_program(
            lambda x, p, w, s, a: product(x, w, s, a), **every, a=torch.tensor([0.004 if kind != torch.int8 else 0.02])
        ),
        "of a norm and its sum": small_program(norm_and_sum, **every, n=norm),
        "of a gate, wider": small_program(
            lambda x, p, w, s: product(OPS.gated_activation(x, x * 3, "silu").repeat(1, 3), w, s), w=wide, s=scales
        ),
    }


@pytest.mark.parametrize("name", ["dynamic", "static", "of a norm and its sum", "of a gate, wider"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_program_quantizes_and_the_product_is_that_of_the_oracle(kind: str, name: str) -> None:
    small = programs(KINDS[kind])[name]
    cleanup(small)
    expected = result(small)
    for hardware in ({}, {"small_gemms": True}, {"sm": 89}):  # the library, kernels for few rows, for any number
        torch.testing.assert_close(planned_result(small, **hardware), expected, rtol=1e-5, atol=1e-5)


def test_numbers_and_scales_come_from_one_program_a_row() -> None:
    small = programs(torch.float8_e4m3fn)["of a norm and its sum"]
    cleanup(small)
    parts = partition(small)
    launches = [part for part in parts.parts if isinstance(part, Launch)]
    kinds = {parts.buffers[name].dtype for name in launches[0].kernel.outputs}
    assert kinds == {torch.float8_e4m3fn, torch.float32} and launches[0].kernel.grid == ("T", "1", "1")


def test_scales_of_blocks() -> None:
    scales = torch.rand(1, 3, generator=torch.Generator().manual_seed(5)) + 0.1
    w = weight(16, 48, torch.float8_e4m3fn)
    small = small_program(lambda x, p, w, s: blocks(x.repeat(1, 3), w, s), w=w, s=scales)
    cleanup(small)
    expected = result(small)
    for hardware in ({}, {"small_gemms": True}):
        torch.testing.assert_close(planned_result(small, **hardware), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_gives_zeros_and_nan_no_finite_number(kind: str) -> None:
    w, s = weight(16, 16, KINDS[kind]), torch.ones(16, 1)
    broken = torch.where(torch.arange(16) == 3, float("nan"), 1.0)
    for factor, check in ((torch.zeros(16), lambda y: (y == 0).all()), (broken, lambda y: (~torch.isfinite(y)).all())):
        small = small_program(lambda x, p, w, s, f: product(x * f, w, s), w=w, s=s, f=factor)
        cleanup(small)
        assert check(result(small)) and check(planned_result(small))


def test_a_gpu_without_float8_is_refused_by_name() -> None:
    small = programs(torch.float8_e4m3fn)["dynamic"]
    cleanup(small)
    with pytest.raises(UnsupportedError, match="SM 86 has no products of float8"):
        plan_program(small, LIMITS, dataclasses.replace(HARDWARE, sm=86))


def test_the_plan_says_what_the_numbers_and_scales_are() -> None:
    small = programs(torch.int8)["dynamic"]
    cleanup(small)
    planned = plan_program(small, LIMITS, HARDWARE)
    (op,) = [op for op in planned.plan.ops if isinstance(op, GemmOp)]
    assert (op.number_dtype, op.dtype) == ("int8", "float32")
    assert op.x_scale is not None and op.weight_scale is not None and op.kernels[-1].most_rows is None
