"""The int8 KV cache of the cpu target: its rows alone, and engines against the oracle with the same rounding."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbuild import BuildConfig, build
from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.cpu import native_library
from llmbuild.builder.targets.cpu.target import CpuTarget
from llmbuild.errors import UnsupportedError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.cache_rounding import round_int8, widened
from llmbuild.quantization.recipes import KvCache, find_recipe
from support.cpu_engines import LIMITS, Conversation, compiled, needs_compiler, open_session, run_step, scenario
from support.rounding import check_rounded_alike, row_errors
from support.tiny_models import save_tiny, tiny_model
from support.traced import traced

CALLS = """
#include "cache_row.h"
extern "C" void store(const float* x, int64_t width, int8_t* row, float* scale) { store_row(x, width, row, scale, 0); }
extern "C" void load(const int8_t* row, int64_t width, const float* scale, float* wide) {
  load_row(row, width, scale, 0, wide);
}
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`store_row` and `load_row` of native/cache_row.h."""
    compiler = native_library.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("rows")
    for name, data in native_library.sources().items():
        (folder / name).write_bytes(data)
    (folder / "calls.cpp").write_text(CALLS)
    command = [*compiler.command, *native_library.FLAGS, "-fvisibility=default", "-o", "rows.so", "calls.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "rows.so"))


def special_rows() -> list[list[float]]:
    nan, inf = float("nan"), float("inf")
    draw = np.random.default_rng(0).normal(size=(40, 16)) * np.logspace(-30, 20, 40)[:, None]
    special = [[0.0] * 16, [-3.0] * 16, [1e4, *[1e-3] * 15], [1e-45] * 16, [*[0.5] * 15, nan], [-inf, *[0.1] * 15]]
    ties = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, *[0.0] * 8]
    return [*draw.tolist(), *special, ties, [nan] * 16]


def test_rows_are_those_of_the_reference_bit_for_bit(rows: Any) -> None:
    x = np.array(special_rows(), np.float32)
    numbers, scales = np.full(x.shape, 99, np.int8), np.full(len(x), -1, np.float32)
    wide = np.full_like(x, -1)
    pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    for i in range(len(x)):
        rows.store(pointer(x[i]), ctypes.c_int64(16), pointer(numbers[i]), pointer(scales[i:]))
        rows.load(pointer(numbers[i]), ctypes.c_int64(16), pointer(scales[i:]), pointer(wide[i]))
    expected, expected_scales = round_int8(torch.from_numpy(x))
    np.testing.assert_array_equal(numbers, expected.numpy())
    np.testing.assert_array_equal(scales, expected_scales[:, 0].numpy())
    np.testing.assert_array_equal(wide, widened(expected, expected_scales).numpy())


def int8_program(family: str, **overrides: Any) -> Program:
    program = traced(family, **overrides)
    optimize(program, replace(find_recipe("none"), kv_cache=KvCache("int8")))
    return program


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "gemma2", "minicpm3"])
def test_engine_rounds_as_the_oracle_does(family: str, tmp_path: Path) -> None:
    program = int8_program(family)
    oracle, state = Oracle(program), PagedState(64, LIMITS.block_size)
    plain = Conversation()
    expected = [oracle.run(plain.step(chunks), state).numpy() for chunks in scenario()]
    target = compiled(program, tmp_path / "engine", native=True)
    session, conversation = open_session(tmp_path / "engine", target), Conversation()
    found = [run_step(session, target, conversation.step(chunks)) for chunks in scenario()]
    check_rounded_alike(row_errors(np.concatenate(found), np.concatenate(expected)))
    for layer, pool in state.keys.items():
        ours, its = session.pools[f"keys.{layer}"], pool.flatten(1).numpy()
        assert ours.dtype == np.int8 and (ours != its).mean() < 1e-3  # a number between two steps may be either
        np.testing.assert_allclose(
            session.pools[f"key_scales.{layer}"], state.key_scales[layer].flatten(1).numpy(), rtol=1e-5
        )


@needs_compiler
def test_q_k_and_v_are_still_read_in_one_piece(tmp_path: Path) -> None:
    program = int8_program("llama")
    compiled(program, tmp_path / "engine", native=True)
    targets = [str(node.target) for node in program.graph.nodes if "d_attention" in str(node.target)]
    assert targets == ["llmbuild_cpu.packed_attention.default"] * 2
    assert "llmbuild.cache_int8.default" not in {str(node.target) for node in program.graph.nodes}


def test_without_native_operators_it_is_refused(tmp_path: Path) -> None:
    program = int8_program("llama")
    with pytest.raises(UnsupportedError, match="an int8 KV cache needs the native operators"):
        compiled(program, tmp_path / "engine", native=False)


@needs_compiler
def test_heads_that_the_native_operator_does_not_know_are_refused(tmp_path: Path) -> None:
    program = int8_program("llama", head_dim=12)
    assert any("heads of 12 channels" in (CpuTarget().supports(node) or "") for node in program.graph.nodes)
    with pytest.raises(UnsupportedError, match="needs the native operators") as error:
        compiled(program, tmp_path / "engine", native=True)
    assert "heads of 12 channels" in str(error.value.where)


def test_fp8_is_refused_at_once_and_what_there_is_is_named(tmp_path: Path) -> None:
    path = save_tiny(tiny_model("llama"), tmp_path / "model")
    with pytest.raises(UnsupportedError, match="the cpu target has no fp8 KV cache") as error:
        build(BuildConfig(model=path, output=tmp_path / "engine", kv_cache_dtype="fp8"))
    assert error.value.hint == "use --kv-cache-dtype int8 or --kv-cache-dtype auto"
    assert not (tmp_path / "engine").exists()
