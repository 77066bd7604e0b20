"""Counters of plans in the interpreter: zero at first, shared by launches, and zero again after each."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import triton
import triton.language as tl

from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter
from llmbuild.engine.launch_plan import PLAN_VERSION, Buffer, Counter, Input, KernelOp, LaunchPlan, Limits, Place
from llmbuild.plugins.kernels.spec import KernelSpec
from llmbuild.runtime.executor import StepInput

LIMITS = Limits(max_num_tokens=4, max_batch_size=2, table_stride=2, block_size=16)


@triton.jit
def last_program(counters, out, FORGETS: tl.constexpr):
    """The last of the programs writes their number, and sets the counter back unless it forgets to."""
    if tl.atomic_add(counters, 1) == tl.num_programs(0) - 1:
        tl.store(out, tl.num_programs(0).to(tl.float32))
        if not FORGETS:
            tl.store(counters, 0)


def interpreter(forgets: bool) -> PlanInterpreter:
    signature = {"counters": "*i32", "out": "*fp32"}
    spec = KernelSpec("last_program", last_program, signature, {"FORGETS": forgets}, grid=("5", "1", "1"))
    logits = Place(kind="buffer", name="logits")
    op = KernelOp(kernel="last_program", arguments=(Place(kind="counter", name="ends"), logits))
    plan = LaunchPlan(
        version=PLAN_VERSION,
        limits=LIMITS,
        inputs=(Input(name="input_ids", dtype="int32", size="T"),),
        weights=(),
        pools=(),
        buffers=(Buffer(name="logits", dtype="float32", size="L * 4", offset=0, first=0, last=2),),
        arena_bytes=256,
        counters=(Counter(name="ends", num_bytes=4),),
        ops=(op, op),
        logits=logits,
        logits_dtype="float32",
        logits_columns=1,
    )
    assert plan.problem() is None
    return PlanInterpreter(SimpleNamespace(plan=plan, specs={"last_program": spec}, weights={}), num_blocks=1)


def step() -> StepInput:
    one = np.ones(1, np.int32)
    return StepInput(
        input_ids=one,
        position_ids=one,
        slot_mapping=one,
        seq_lens=one,
        cu_q_lens=np.array([0, 1], np.int32),
        block_tables=np.zeros((1, 2), np.int32),
        logits_indices=np.zeros(1, np.int32),
    )


def test_launches_share_a_counter() -> None:
    runs = interpreter(forgets=False)
    assert [runs.forward(step()).tolist() for _ in range(2)] == [[[5.0]], [[5.0]]]


def test_a_kernel_that_leaves_one_is_told() -> None:
    with pytest.raises(AssertionError, match="last_program does not leave ends zero"):
        interpreter(forgets=True).forward(step())
