"""Whole models cut into parts, planned, and run in the interpreter: the logits are the oracle's."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.targets.cuda.kernel_source import specs
from llmbuild.builder.targets.cuda.partition import Barrier, Launch, Partition, partition
from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter
from llmbuild.plugins.attention_reference import PagedState
from support.packed_driver import Request, drive
from support.plans import tiny_executor
from support.traced import optimized

# Launches of row programs in two layers, and how many distinct kernels they take.
FAMILIES = {
    "llama": (11, 7),
    "qwen3": (11, 7),
    "gemma2": (12, 8),
    "gpt2": (11, 7),
    "phi": (8, 7),
    "cohere": (9, 8),
    "falcon": (8, 7),
    "mixtral": (11, 7),
    "deepseek_v3": (12, 9),
    "gpt_oss": (11, 7),
}

QUICK = {"llama", "qwen3", "gpt2", "deepseek_v3"}


def requests() -> list[Request]:
    """A prompt of three tokens that goes on, and one token that joins it: steps of three and of two."""
    draw = np.random.default_rng(1).integers(3, 250, 6).tolist()
    return [Request(draw[:4], prompt=3), Request(draw[4:], prompt=1, arrives=1)]


def launches(parts: Partition) -> list[Launch]:
    return [part for part in parts.parts if isinstance(part, Launch)]


@pytest.fixture(scope="module")
def llama() -> Program:
    return optimized("llama")


def agreeing(program: Program) -> PlanInterpreter:
    """Run `program` as a plan and as a graph; logits and KV pools must agree. Returns what ran the plan."""
    executor, oracle = tiny_executor(program), Oracle(program)
    plain = PagedState(num_blocks=8, block_size=8)
    expected = np.concatenate(drive(lambda s: oracle.run(s, plain).numpy(), requests(), num_blocks=8))
    found = np.concatenate(drive(executor.forward, requests(), num_blocks=8))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    pools = {f"keys_{layer}": pool for layer, pool in plain.keys.items()}
    pools |= {f"values_{layer}": pool for layer, pool in plain.values.items()}
    assert pools.keys() == executor.pools.keys()
    for name, pool in pools.items():
        torch.testing.assert_close(executor.pools[name], pool.flatten(), rtol=1e-5, atol=1e-5)
    return executor


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_the_parts_compute_the_logits_of_the_graph(family: str) -> None:
    program = optimized(family)
    agreeing(program)
    parts = partition(program)
    assert (len(launches(parts)), len(parts.kernels)) == FAMILIES[family]


def test_a_llama_layer_takes_four_row_programs(llama: Program) -> None:
    """Rope with the append to the KV pools, norm, activation, norm: one for each gap between barriers."""
    two, three = partition(llama), partition(optimized("llama", num_hidden_layers=3))
    assert len(launches(three)) - len(launches(two)) == 4
    assert len(three.kernels) == len(two.kernels)  # another layer is more launches of the same kernels


def test_attention_reads_queries_where_they_were_rotated_and_appends_nothing(llama: Program) -> None:
    parts = partition(llama)
    attention = next(p for p in parts.parts if isinstance(p, Barrier) and p.kind == "attention")
    assert [view.buffer.split("_")[0] for view in attention.inputs] == ["rope", "keys", "values"]
    writer = next(p for p in launches(parts) if "keys_0" in p.arguments)
    assert writer.arguments[-1] == "slot_mapping" and "values_0" in writer.kernel.outputs


def test_tokens_without_a_slot_append_nothing(llama: Program) -> None:
    kernel = next(kernel for kernel in partition(llama).kernels if "keys_0" in kernel.outputs)
    assert "mask=slot_mapping_wide >= 0" in kernel.source


def test_gemms_read_views_in_place(llama: Program) -> None:
    """The output projection reads what attention left, reshaped; nothing is copied in between."""
    parts = partition(llama)
    kinds = [part.kind if isinstance(part, Barrier) else "rows" for part in parts.parts]
    first = kinds.index("attention")
    assert kinds[first : first + 2] == ["attention", "gemm"]
    view = parts.parts[first + 1].inputs[0]  # type: ignore[union-attr]
    assert view.buffer.startswith("paged_attention") and view.strides == (64, 1)


def test_the_source_is_the_same_every_time_and_names_no_path(llama: Program) -> None:
    source = partition(llama).source
    assert partition(copy.deepcopy(llama)).source == source
    assert "/" not in source.replace(" / ", "").replace(" // ", "")


def test_kernels_have_specs_that_the_compiler_takes(llama: Program) -> None:
    pytest.importorskip("triton")
    from llmbuild.builder.targets.cuda.aot import compile_spec

    parts = partition(llama)
    found = {spec.name: spec for spec in specs(parts)}
    assert list(found) == [kernel.name for kernel in parts.kernels]
    rotation = next(kernel for kernel in parts.kernels if "keys_0" in kernel.outputs)
    spec = found[rotation.name]
    assert spec.grid == ("T", "2", "1")
    assert spec.signature["slot_mapping_ptr"] == "*i32" and spec.signature["keys_0_ptr"] == "*fp32"
    assert compile_spec(spec, 90).data


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_kernels_of_bfloat16_models_compile(family: str) -> None:
    from llmbuild.builder.targets.cuda.aot import compile_spec

    for spec in specs(partition(optimized(family, dtype=torch.bfloat16))):
        for sm in (80, 90):
            assert compile_spec(spec, sm).data
