"""Plans with a KV cache in 8 bits, through the interpreter: what the oracle computes with the same rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.cuda.lowering import plan_program
from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.recipes import KvCache, find_recipe
from support.calibrated import gathered
from support.packed_driver import Request, drive
from support.plans import HARDWARE
from support.tiny_models import save_tiny, tiny_model

LIMITS = Limits(max_batch_size=8, max_num_tokens=32, max_seq_len=64, block_size=8)
# One head a group and several, norms of queries and keys, windows and softcaps, heads of 24 and 16 channels.
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "minicpm3")
QUICK = {"llama", "gemma2"}


def program_of(family: str, directory: Path, cache: KvCache, quant: str = "none", sm: int = 90) -> Program:
    path = save_tiny(tiny_model(family), directory / "model", tokenizer=False)
    program = load_program(path, dtype=torch.float32)
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


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_plan_rounds_as_the_oracle_does(family: str, dtype: str, tmp_path: Path) -> None:
    program = program_of(family, tmp_path, KvCache(dtype))  # type: ignore[arg-type]
    found, expected, executor, state = logits(program)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    for name, pools in (("keys", state.keys), ("values", state.values)):
        for layer, pool in pools.items():
            ours = executor.pools[f"{name}_{layer}"]
            assert ours.dtype == pool.dtype and torch.equal(ours, pool.flatten())
