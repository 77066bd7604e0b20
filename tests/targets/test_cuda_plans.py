"""Launch plans of tiny models: quantized weights, products of few rows, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.cuda import lowering
from llmbuild.builder.targets.cuda.lowering import Planned, plan_program
from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter
from llmbuild.engine.launch_plan import GemmOp
from llmbuild.errors import UnsupportedError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.kernels import block_layout
from support.packed_driver import Request, drive
from support.plans import HARDWARE
from support.traced import optimized

LIMITS = Limits(max_batch_size=8, max_num_tokens=32, max_seq_len=64, block_size=8)


def difference(program: Program, planned: Planned) -> float:
    """Return the largest difference to the oracle, relative to the largest logit."""
    draw = np.random.default_rng(1).integers(3, 250, 26).tolist()
    requests = [Request(draw[:20], prompt=18), Request(draw[20:24], prompt=1, arrives=1)]
    state, oracle = PagedState(num_blocks=8, block_size=8), Oracle(program)
    run = PlanInterpreter(planned, num_blocks=8).forward
    expected = np.concatenate(drive(lambda s: oracle.run(s, state).numpy(), requests, num_blocks=8, all_rows=False))
    found = np.concatenate(drive(run, requests, num_blocks=8, all_rows=False))
    asked = ~np.isnan(expected).any(axis=1)
    return float(np.abs(found - expected)[asked].max() / np.abs(expected[asked]).max())


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "int8-wo"),
        ("gemma2", "int4-wo"),
        ("mixtral", "int8-wo"),
        ("llama", "int8-wo-channel"),
        ("llama", "int4-wo-g64-asym"),
    ],
)
def test_block_quantized_weights_are_multiplied_by_kernels_of_the_engine(family: str, recipe: str) -> None:
    """18 rows, few and one: a kernel for each, none for the library."""
    program = optimized(family, recipe)
    planned = plan_program(program, LIMITS, HARDWARE)
    products = [op for op in planned.plan.ops if isinstance(op, GemmOp) and op.kernels]
    assert products and all(op.kernels[-1].most_rows is None for op in products)
    packed = [weight for weight in planned.plan.weights if weight.name.endswith("_packed")]
    assert packed and all(weight.dtype == "uint8" for weight in packed)
    assert difference(program, planned) < 1e-5


def test_few_rows_of_16_bit_numbers_times_blocks_of_4_bits() -> None:
    """One kernel for one row and a few: a product of each group of 128 columns."""
    program = optimized("llama", "int4-wo-g128", dtype=torch.float16, hidden_size=128, intermediate_size=256)
    planned = plan_program(program, LIMITS, HARDWARE)
    products = [op for op in planned.plan.ops if isinstance(op, GemmOp) and op.kernels]
    first = [planned.specs[op.kernels[0].launches[0].kernel].function.__name__ for op in products]
    assert first.count("block_few_gemm") == 8 and first.count("block_row_gemm") == 1  # the head is kept in 8 bits
    assert [op.kernels[0].most_rows for op in products].count(8) == 8
    assert difference(program, planned) < 1e-2


def test_a_kernel_that_has_no_interpreter_is_stood_in_for() -> None:
    program = optimized("llama", dtype=torch.float16, head_dim=64)
    planned = plan_program(program, LIMITS, HARDWARE)
    assert [name for name, spec in planned.specs.items() if spec.interpreted] == ["attention_prefill"]
    assert difference(program, planned) < 1e-2


def test_products_of_few_rows_are_computed_by_kernels_of_the_engine() -> None:
    program = optimized("llama")
    planned = plan_program(program, LIMITS, dataclasses.replace(HARDWARE, small_gemms=True))
    products = [op for op in planned.plan.ops if isinstance(op, GemmOp)]
    assert all(op.kernels[0].most_rows == 1 for op in products)
    assert all(op.kernels_for(1000) is None for op in products)
    assert difference(program, planned) < 1e-5


def test_blocks_that_no_kernel_reads_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_layout, "BITS", (4,))
    with pytest.raises(UnsupportedError, match=r"linear_blockwise.*8 bits; kernels read 4"):
        plan_program(optimized("llama", "int8-wo"), LIMITS, HARDWARE)


def test_logits_of_a_half_precision_model_are_not_widened() -> None:
    planned = plan_program(optimized("llama", dtype=torch.bfloat16), LIMITS, HARDWARE)
    assert planned.plan.logits_dtype == "bfloat16"


def test_sampling_is_in_the_plan_unless_the_vocabulary_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = optimized("llama")
    hardware = dataclasses.replace(HARDWARE, sampling=True)
    sampling = plan_program(program, LIMITS, hardware).plan.sampling
    assert sampling is not None and sampling.num_tokens == program.info.vocab_size
    monkeypatch.setattr(lowering, "MOST_TOKENS", sampling.num_tokens - 1)
    assert plan_program(program, LIMITS, hardware).plan.sampling is None


def test_the_arena_is_no_larger_than_what_lives_at_once_needs_by_much() -> None:
    planned = plan_program(optimized("gemma2"), LIMITS, HARDWARE)
    assert planned.needed <= planned.plan.arena_bytes <= 1.25 * planned.needed
