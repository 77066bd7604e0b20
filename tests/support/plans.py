"""Launch plans of tiny programs, run through the interpreter."""

from __future__ import annotations

from llmbuild.builder.ir import Program
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.cuda.lowered import Hardware
from llmbuild.builder.targets.cuda.lowering import Planned, plan_program
from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter

# One multiprocessor: keys are split a few times, not for a whole card, and the interpreter has less to run.
HARDWARE = Hardware(90, processors=1, small_gemms=False, sampling=False)


def tiny_plan(program: Program, *, tokens: int = 32, block_size: int = 8) -> Planned:
    limits = Limits(max_batch_size=8, max_num_tokens=tokens, max_seq_len=64, block_size=block_size)
    return plan_program(program, limits, HARDWARE)


def tiny_executor(program: Program, *, num_blocks: int = 8, block_size: int = 8) -> PlanInterpreter:
    """Return an executor of an optimised program's plan."""
    return PlanInterpreter(tiny_plan(program, block_size=block_size), num_blocks)
