"""Plans with a KV cache in 8 bits, through the interpreter: what the oracle computes with the same rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmbuild.builder import sections
from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.builder.targets.cuda.lowering import plan_program
from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.quantization.recipes import KvCache, find_recipe
from llmbuild.runtime.executors.cuda.memory import block_bytes
from support.calibrated import gathered
from support.packed_driver import Request, drive
from support.plans import HARDWARE
from support.rounding import check_rounded_alike, row_errors
from support.traced import traced

LIMITS = Limits(max_batch_size=8, max_num_tokens=32, max_seq_len=64, block_size=8)
# One head a group and several, norms of queries and keys, windows and softcaps, heads of 24 and 16 channels.
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "minicpm3")
QUICK = {("llama", "fp8"), ("llama", "int8"), ("gemma2", "int8")}
CASES = [
    pytest.param(family, dtype, marks=() if (family, dtype) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for dtype in ("fp8", "int8")
]


def program_of(family: str, cache: KvCache | None, quant: str = "none") -> Program:
    program = traced(family)
    draw = np.random.default_rng(3).integers(3, 250, 40).tolist()
    optimize(program, replace(find_recipe(quant), kv_cache=cache), calibrate=gathered([draw]))
    return program


def logits(program: Program, sm: int = 90) -> tuple[np.ndarray, np.ndarray, PlanInterpreter, PagedState]:
    """Run chunks, decode and a request that joins, by the plan and by the oracle."""
    draw = np.random.default_rng(1).integers(3, 250, 26).tolist()
    requests = [Request(draw[:20], prompt=18, chunks=(7,)), Request(draw[20:24], prompt=1, arrives=1)]
    state, oracle = PagedState(num_blocks=8, block_size=8), Oracle(program)
    executor = PlanInterpreter(plan_program(program, LIMITS, replace(HARDWARE, sm=sm)), num_blocks=8)
    expected = np.concatenate(drive(lambda s: oracle.run(s, state).numpy(), requests, num_blocks=8, all_rows=False))
    found = np.concatenate(drive(executor.forward, requests, num_blocks=8, all_rows=False))
    asked = ~np.isnan(expected).any(axis=1)
    return found[asked], expected[asked], executor, state


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_plan_rounds_as_the_oracle_does(family: str, dtype: str) -> None:
    program = program_of(family, KvCache(dtype))  # type: ignore[arg-type]
    found, expected, executor, state = logits(program)
    check_rounded_alike(row_errors(found, expected), typical=1e-3)  # 8 rows
    for name, pools in (("keys", state.keys), ("values", state.values)):
        for layer, pool in pools.items():
            ours = executor.pools[f"{name}_{layer}"]
            assert ours.dtype == pool.dtype and (ours != pool.flatten()).float().mean() < 1e-3


def test_sms_without_the_type_read_its_bits() -> None:
    program = program_of("llama", KvCache("fp8"))
    planned = plan_program(program, LIMITS, replace(HARDWARE, sm=80))
    attention = [spec for name, spec in planned.specs.items() if name.startswith("attention")]
    assert {spec.signature["keys"] for spec in attention if "keys" in spec.signature} == {"*u8"}
    found, expected, _, _ = logits(program, sm=80)
    check_rounded_alike(row_errors(found, expected), typical=1e-3)


@pytest.mark.parametrize("cache", [None, KvCache("fp8"), KvCache("int8")])
def test_pools_take_the_bytes_that_the_engine_says(cache: KvCache | None) -> None:
    """What `--kv-memory-fraction` shares out, and what `llmbuild inspect` and a dry run tell."""
    program = program_of("minicpm3", cache)
    plan = plan_program(program, LIMITS, HARDWARE).plan
    section = sections.kv_cache(program, "float32", LIMITS, cache)
    assert block_bytes(plan) == section.token_bytes * LIMITS.block_size
    kinds = {pool.name.rpartition("_")[0]: pool.dtype for pool in plan.pools}
    numbers = {None: "float32", "fp8": "uint8", "int8": "int8"}[cache and cache.dtype]
    scales = dict.fromkeys(("key_scales", "value_scales"), "float32") if numbers == "int8" else {}
    assert kinds == {"keys": numbers, "values": numbers} | scales


@pytest.mark.parametrize(("key", "value", "block"), [(24, 16, 32), (16, 16, 16), (96, 64, 64), (192, 128, 128)])
def test_no_tile_of_16_values_beside_wider_keys(key: int, value: int, block: int) -> None:
    """Compiled for SM 90 such a tile reads shared memory that is not its own."""
    shape = AttentionShape(4, 4, key, value, scale=0.2, kv_dtype="int8", kv_scales="token")
    assert shape.constants()["VALUE_BLOCK"] == block
    assert replace(shape, kv_dtype="bfloat16", kv_scales="none").constants()["VALUE_BLOCK"] == min(block, value)


@pytest.mark.parametrize("dtype", [pytest.param("fp8", marks=pytest.mark.slow), "int8"])
def test_quantized_weights_and_cache_go_together(dtype: str) -> None:
    program = program_of("llama", KvCache(dtype), quant="int8-wo")  # type: ignore[arg-type]
    found, expected, _, _ = logits(program)
    check_rounded_alike(row_errors(found, expected), typical=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("sm", [80, 89, 90, 120])
def test_kernels_compile(dtype: str, sm: int) -> None:
    program = program_of("llama", KvCache(dtype))  # type: ignore[arg-type]
    planned = plan_program(program, LIMITS, replace(HARDWARE, sm=sm))
    touched = [spec for spec in planned.specs.values() if {"keys", "keys_0_ptr"} & set(spec.signature)]
    assert len(touched) >= 3
    for spec in touched:
        assert compile_spec(spec, sm).data
