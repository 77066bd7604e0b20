"""Attention over chunks on SM 90: which layers it is for, as compiled, and on a GPU against the plain reference."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.attention_hopper import attention_hopper, chunk_spec, fits, hopper_prefill_spec
from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES, AttentionShape
from llmbuild.plugins.kernels.paged_attention_prefill import paged_attention_prefill
from support.attention_cases import check, launch, make_case

LLAMA = AttentionShape(32, 8, 128, 128, scale=128**-0.5)
HALF = AttentionShape(14, 14, 64, 64, scale=0.125, dtype="float16", kv_dtype="float16", page=32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@pytest.mark.parametrize("shape", [LLAMA, HALF, replace(LLAMA, kv_heads=1), replace(LLAMA, page=64)])
def test_plain_layers_take_it(shape: AttentionShape) -> None:
    assert chunk_spec(shape, 90).function is attention_hopper
    assert chunk_spec(shape, 100).function is paged_attention_prefill


@pytest.mark.parametrize(
    "change",
    [
        {"window": 100},
        {"softcap": 30.0},
        {"sinks": True},
        {"alibi": True},
        {"head_dim": 96, "value_dim": 96},
        {"value_dim": 64},
        {"heads": 24},
        {"dtype": "float32", "kv_dtype": "float32"},
        {"kv_dtype": "float8_e4m3fn", "kv_scales": "layer"},
        {"kv_dtype": "int8", "kv_scales": "token"},
    ],
)
def test_other_layers_do_not(change: dict) -> None:
    shape = replace(LLAMA, **change)
    assert not fits(shape, 90)
    assert chunk_spec(shape, 90).function is paged_attention_prefill


def test_the_grid_is_no_larger_than_the_card() -> None:
    grid = hopper_prefill_spec(LLAMA, processors=114).grid[0]
    assert [evaluate(grid, {"T": tokens, "B": 1}) for tokens in (31, 64, 8192)] == [8, 24, 114]


def test_what_is_interpreted_takes_the_same_arguments() -> None:
    spec = hopper_prefill_spec(LLAMA, pdl=True)
    assert spec.interpreted is not None
    assert dict(spec.interpreted.signature) == dict(spec.signature)


def compiled(shape: AttentionShape, folder: Path) -> bytes:
    """Compile, not out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        cubin = compile_spec(hopper_prefill_spec(shape, pdl=True), 90)
    assert cubin.launch.num_warps == 12
    assert cubin.launch.shared <= SHARED_BYTES[90] * 1024
    return bytes(cubin.data)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "stack"), [(LLAMA, 16), (HALF, 0)])
def test_compiled_twice_alike_and_next_to_nothing_leaves_the_registers(
    shape: AttentionShape, stack: int, tmp_path: Path
) -> None:
    """No more than the stated bytes of stack a thread, of addresses that are read once a piece of work."""
    code = compiled(shape, tmp_path / "one")
    assert compiled(shape, tmp_path / "two") == code
    path = tmp_path / "code.cubin"
    path.write_bytes(code)
    usage = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    assert f"STACK:{stack} " in usage and "LOCAL:0 " in usage


RAGGED = {
    "all new": [(200, 200), (33, 33)],
    "chunks and decoded tokens": [(17, 17), (1, 30), (9, 61), (0, 5), (300, 1000), (129, 129), (1, 1), (64, 128)],
    "many sequences": [(77, 1500)] + [(3, 9)] * 150 + [(0, 0)] * 4,
}


@pytest.mark.gpu_sm90
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("shape", [LLAMA, HALF], ids=["llama", "half"])
def test_right_on_the_gpu(shape: AttentionShape, lengths: list[tuple[int, int]]) -> None:
    case = make_case(shape, lengths)
    launch(hopper_prefill_spec(shape, pdl=True), case)
    check(case)
