"""W8A8 INT8 plans of whole models in the interpreter against the oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.passes.edit import arg
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.cuda.lowering import Planned, plan_program
from llmbuild.builder.targets.cuda.partition import Launch, partition
from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter
from llmbuild.engine.launch_plan import GemmOp
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.recipes import find_recipe
from support.calibrated import gathered
from support.packed_driver import Request, drive
from support.plans import HARDWARE
from support.rounding import check_rounded_alike, row_errors
from support.traced import traced

LIMITS = Limits(max_batch_size=8, max_num_tokens=32, max_seq_len=64, block_size=8)
TOKENS = np.random.default_rng(1).integers(3, 250, 26).tolist()


def program_of(family: str, recipe: str) -> Program:
    program = traced(family)
    optimize(program, find_recipe(recipe), calibrate=gathered([TOKENS]))
    return program


def errors(program: Program, planned: Planned) -> np.ndarray:
    """Return the largest difference of each row of logits to the oracle's, relative to the largest logit."""
    requests = [Request(TOKENS[:20], prompt=18), Request(TOKENS[20:24], prompt=1, arrives=1)]
    state, oracle = PagedState(num_blocks=8, block_size=8), Oracle(program)
    run = PlanInterpreter(planned, num_blocks=8).forward
    expected = np.concatenate(drive(lambda s: oracle.run(s, state).numpy(), requests, num_blocks=8, all_rows=False))
    found = np.concatenate(drive(run, requests, num_blocks=8, all_rows=False))
    asked = ~np.isnan(expected).any(axis=1)
    return row_errors(found[asked], expected[asked])


@pytest.mark.parametrize(
    ("family", "recipe", "few"),
    [
        ("llama", "int8", False),
        ("llama", "int8-sq", True),
        ("llama", "int8-sq-static", False),
        ("mixtral", "int8", False),
        pytest.param("llama", "int8-sq", False, marks=pytest.mark.slow),
        pytest.param("qwen3", "int8-sq", False, marks=pytest.mark.slow),
        pytest.param("qwen3", "int8-sq", True, marks=pytest.mark.slow),
    ],
)
def test_a_plan_computes_what_the_oracle_does(family: str, recipe: str, few: bool) -> None:
    """Integers are summed exactly, so that only a value on the edge between two levels may fall otherwise. few: with
    the kernels for few rows, which are the same for every recipe."""
    program = program_of(family, recipe)
    planned = plan_program(program, LIMITS, dataclasses.replace(HARDWARE, small_gemms=few))
    products = [op for op in planned.plan.ops if isinstance(op, GemmOp) and op.number_dtype == "int8"]
    assert len(products) == (2 * 2 if family == "mixtral" else 2 * 4)
    check_rounded_alike(errors(program, planned))


def test_row_programs_leave_integers_and_scales_and_no_floats_for_products() -> None:
    """Rounding is part of the program that makes a value: none is written as floats to be rounded by another."""
    program = program_of("llama", "int8-sq")
    parts = partition(program)
    launches = [part for part in parts.parts if isinstance(part, Launch)]
    made = {name for part in launches for name in part.arguments[: len(part.kernel.outputs)]}
    rounded = [arg(node, 0) for node in program.graph.nodes if "quantize_rows" in str(node.target)]
    assert len(rounded) == 8 and not made & {x.name for x in rounded}
    readers = [part for part in parts.parts if not isinstance(part, Launch) and part.kind == "scaled_gemm"]
    assert {parts.buffers[view.buffer].dtype for part in readers for view in part.inputs} == {
        torch.int8,
        torch.float32,
    }
    assert len(readers) == 8 and len({view.buffer for part in readers for view in part.inputs}) == 16
