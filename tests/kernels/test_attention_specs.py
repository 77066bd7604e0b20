"""The attention kernels as they are compiled: plans, tilings that fit, and code for each SM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmbuild.builder.targets.cuda.aot import compile_spec
from llmbuild.plugins.kernels.attention_shape import SHARED_BYTES, AttentionShape, split_width
from llmbuild.plugins.kernels.paged_attention_decode import decode_plan
from llmbuild.plugins.kernels.paged_attention_prefill import prefill_spec
from llmbuild.plugins.kernels.spec import KernelSpec

LLAMA = AttentionShape(32, 8, 128, 128, scale=128**-0.5)
SHAPES = {
    "llama": LLAMA,
    "gpt_oss": AttentionShape(64, 8, 64, 64, scale=0.125, window=128, sinks=True),
    "gemma_2": AttentionShape(8, 4, 256, 256, scale=0.0625, softcap=50.0, window=4096),
    "alibi": AttentionShape(32, 32, 128, 128, scale=128**-0.5, alibi=True),
    "mla": AttentionShape(16, 16, 192, 128, scale=192**-0.5),
    "mla_absorbed": AttentionShape(128, 1, 576, 512, scale=192**-0.5),
    "head_80": AttentionShape(32, 8, 80, 80, scale=80**-0.5),
    "float32": AttentionShape(8, 2, 64, 64, scale=0.125, dtype="float32", kv_dtype="float32"),
    "int8": replace(LLAMA, kv_dtype="int8", kv_scales="token"),
    "float8": replace(LLAMA, kv_dtype="float8_e4m3fn", kv_scales="layer"),
    "float8_bits": replace(LLAMA, kv_dtype="uint8", kv_scales="layer"),
}


def specs_of(name: str, sm: int) -> list[KernelSpec]:
    plan = decode_plan(SHAPES[name], sm, pdl=sm >= 90)
    return [plan.attend, plan.merge, prefill_spec(SHAPES[name], sm, pdl=sm >= 90)]


def compile_and_check(name: str, sm: int) -> None:
    for spec in specs_of(name, sm):
        assert compile_spec(spec, sm).launch.shared <= SHARED_BYTES[sm] * 1024, spec.name


@pytest.mark.parametrize("sm", [80, 90])
def test_compiles(sm: int) -> None:
    compile_and_check("llama", sm)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_compiles_and_fits(name: str, sm: int) -> None:
    if SHAPES[name].kv_dtype == "float8_e4m3fn" and sm < 89:
        pytest.skip("these have no conversion from float8_e4m3")
    compile_and_check(name, sm)


@pytest.mark.parametrize(
    ("size", "parts"),
    [(8, (16, 0)), (16, (16, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (112, (128, 0)), (192, (128, 64)),
     (256, (256, 0)), (576, (512, 64))],
)  # fmt: skip
def test_head_sizes_are_covered_by_powers_of_2(size: int, parts: tuple[int, int]) -> None:
    assert split_width(size) == parts
    assert sum(parts) >= size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 5}, "32 query heads cannot share 5 KV heads evenly"),
        ({"head_dim": 0}, "is not positive"),
        ({"scale": -1.0}, "scale -1.0 is not positive"),
        ({"window": 0}, "window 0 or softcap None is not positive"),
        ({"softcap": -2.0}, "window None or softcap -2.0 is not positive"),
        ({"kv_scales": "block"}, "kv_scales 'block' is none of none, layer, token"),
        ({"dtype": "bf16"}, "dtype 'bf16' is none of float32"),
        ({"kv_dtype": "float16"}, "a float16 cache cannot serve bfloat16 queries"),
    ],
)
def test_refused_shapes(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **change)


def test_absent_features_are_no_arguments() -> None:
    plain, all_features = (
        prefill_spec(shape, 90).signature
        for shape in (LLAMA, replace(SHAPES["int8"], sinks=True, alibi=True, window=9, softcap=2.0))
    )
    assert {"sinks", "slopes", "k_scales", "v_scales"} == all_features.keys() - plain.keys()
