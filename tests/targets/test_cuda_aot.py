"""Kernels compiled without a GPU: reproducible, launched as derived, and with clear words when they cannot be."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import triton
import triton.language as tl

from llmbuild.builder.targets.cuda import aot
from llmbuild.builder.targets.cuda.parameters import check_parameters, place, ptx_parameters
from llmbuild.builder.targets.cuda.sms import parse_sms
from llmbuild.engine.cubin import TensorMap
from llmbuild.engine.kernel_pack import KernelPack, write_pack
from llmbuild.errors import ConfigError, LLMBuildError
from llmbuild.plugins.kernels.interpreter import interpret
from llmbuild.plugins.kernels.kv_store import kv_store_spec
from llmbuild.plugins.kernels.spec import KernelSpec, pointers

SLOW = [pytest.param(sm, marks=pytest.mark.slow) for sm in (86, 89, 100, 120)]


@triton.jit
def every_kind(a, flag, small, short, number, large, factor, b, none, OFFSET: tl.constexpr):
    value = tl.load(a).to(tl.float32) * factor + small + short + number + large + OFFSET
    if flag:
        tl.store(b, value)


@triton.jit
def tile_copy(x, y, M: tl.constexpr):
    i = tl.arange(0, M)
    tl.store(y + i[:, None] * M + i[None, :], x.load([0, 0]))


@triton.jit
def scratch_copy(x, y, M: tl.constexpr):
    tile = tl.make_tensor_descriptor(x, [M, M], [M, 1], [M, M]).load([0, 0])
    i = tl.arange(0, M)
    tl.store(y + i[:, None] * M + i[None, :], tile)


@triton.jit
def not_in_triton(x):
    tl.store(x, tl.load(x) @ 3)


SCALARS = {"flag": "i1", "small": "i8", "short": "i16", "number": "i32", "large": "i64", "factor": "fp32"}
EVERY = KernelSpec(
    "every_kind", every_kind, {"a": "*bf16", **SCALARS, "b": "*fp32"}, {"none": None, "OFFSET": 3}, ("a",)
)
TILE = KernelSpec("tile_copy", tile_copy, {"x": "tensordesc<bf16[64, 64]>", "y": "*bf16"}, {"M": 64}, ("y",))
STORE = kv_store_spec(
    "kv_store",
    dtype="bfloat16",
    pool_dtype="bfloat16",
    num_kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    k_stride=6144,
    v_stride=6144,
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile for real, not out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("sm", [80, 90, *SLOW])
def test_parameters_are_those_of_the_compiled_kernel(sm: int) -> None:
    launch = aot.compile_spec(EVERY, sm).launch
    placed = [(p.name, p.kind, p.offset, p.size) for p in launch.parameters]
    assert placed == [
        ("a", "*bf16", 0, 8),
        ("flag", "i1", 8, 1),
        ("small", "i8", 9, 1),
        ("short", "i16", 10, 2),
        ("number", "i32", 12, 4),
        ("large", "i64", 16, 8),
        ("factor", "fp32", 24, 4),
        ("b", "*fp32", 32, 8),
        ("global_scratch", "scratch", 40, 8),
        ("profile_scratch", "scratch", 48, 8),
    ]
    assert (launch.sm, launch.symbol, launch.num_warps, launch.num_ctas) == (sm, "every_kind", 4, 1)
    assert not (launch.pdl or launch.cooperative or launch.global_scratch)


@pytest.mark.parametrize("sm", [80, 90, *SLOW])
def test_a_tensor_descriptor_is_several_parameters(sm: int) -> None:
    launch = aot.compile_spec(TILE, sm).launch
    ends = ["x.shape0", "x.shape1", "x.stride0", "x.stride1"]
    names = [p.name for p in launch.parameters]
    if sm < 90:
        assert names == ["x.base", *ends, "x.nan", *ends, "y", "global_scratch", "profile_scratch"]
        assert launch.tensor_maps == ()
    else:
        assert names == ["x.map", *ends, "y", "global_scratch", "profile_scratch"]
        # 9: CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; rows of 64 bfloat16 are 128 bytes, the widest swizzle
        assert launch.tensor_maps == (TensorMap(argument="x", element=9, element_size=2, swizzle=3, block=(64, 64)),)


def test_descriptors_made_by_the_kernel_need_scratch() -> None:
    signature = {"x": "*bf16", "y": "*bf16"}
    spec = KernelSpec("scratch_copy", scratch_copy, signature, {"M": 64}, pointers(signature))
    launch = aot.compile_spec(spec, 90).launch
    assert launch.global_scratch >= 128 and launch.global_scratch_align >= 64


def test_options_reach_the_compiler() -> None:
    changed = dataclasses.replace(EVERY, num_warps=8, options={"launch_pdl": True})
    launch = aot.compile_spec(changed, 90).launch
    assert launch.num_warps == 8 and launch.pdl


PTX = """
.visible .entry f(
	.param .u64 .ptr .global .align 1 f_param_0,
	.param .align 64 .b8 f_param_1[128],
	.param .u32 f_param_2,
	.param .f32 f_param_3,
	.param .u64 .ptr .global .align 1 f_param_4,
	.param .u64 .ptr .global .align 1 f_param_5
)
{
}
"""


def test_reading_the_parameters_of_a_ptx_text() -> None:
    pointer = (8, 8, "pointer")
    assert ptx_parameters(PTX) == [pointer, (128, 64, "bytes"), (4, 4, "integer"), (4, 4, "float"), pointer, pointer]
    with pytest.raises(LLMBuildError, match=r"a parameter that is not understood: '\.param \.texref f_param_0'"):
        ptx_parameters(".visible .entry f(\n\t.param .texref f_param_0\n)")
    with pytest.raises(LLMBuildError, match="0 kernels in one PTX text"):
        ptx_parameters("")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ("a:*fp32 n:i32", "f was compiled with 6 parameters, 4 were derived"),
        (
            "a:*fp32 b:i64 n:i32 x:fp32",
            r"b \(i64\) was derived as integer of 8 bytes aligned to 8, compiled as bytes of",
        ),
        ("a:*fp32 m:tensormap x:fp32 n:i32", r"x \(fp32\) was derived as float of 4 .* compiled as integer of 4"),
        ("a:i64 m:tensormap n:i32 x:fp32", r"a \(i64\) was derived as integer of 8 .* compiled as pointer of 8"),
        ("a:*fp32 m:tensormap n:i16 x:fp32", r"n \(i16\) was derived as integer of 2 .* compiled as integer of 4"),
    ],
)
def test_other_parameters_than_derived_are_refused(kinds: str, message: str) -> None:
    pairs = [(name, kind) for name, _, kind in (text.partition(":") for text in kinds.split())]
    scratch = [("global_scratch", "scratch"), ("profile_scratch", "scratch")]
    with pytest.raises(LLMBuildError, match=message):
        check_parameters(place([*pairs, *scratch]), PTX, kernel="f")


BUILD = """
import sys
from pathlib import Path
from llmbuild.builder.targets.cuda import aot
from llmbuild.engine.kernel_pack import write_pack
from llmbuild.plugins.kernels.kv_store import kv_store_spec
kinds = {"num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "k_stride": 512, "v_stride": 512, "dtype": "bfloat16"}
specs = [kv_store_spec("kv_" + pool, pool_dtype=pool, **kinds) for pool in ("bfloat16", "float8_e4m3fn")]
write_pack(Path(sys.argv[1]), aot.compile_all(specs, [80, 90]), compiler=aot.COMPILER)
"""


def test_a_rebuild_gives_the_same_bytes_without_paths(tmp_path: Path) -> None:
    packs = []
    for number, seed in enumerate(("1", "2")):
        folder = tmp_path / f"somewhere-{number}"
        folder.mkdir()
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", BUILD, "pack"], check=True, cwd=folder, env=environment)
        packs.append((folder / "pack").read_bytes())
    assert packs[0] == packs[1]
    assert len(KernelPack.open(tmp_path / "somewhere-0" / "pack").names) == 2
    for path in (str(tmp_path), "somewhere", "kv_store.py", "plugins", str(Path(triton.__file__).parent)):
        assert path.encode() not in packs[0]


def test_a_kernel_compiles_after_it_was_interpreted_and_the_other_way_round() -> None:
    import torch

    x, y = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1)
    arguments = {"flag": True, "small": 1, "short": 2, "number": 3, "large": 7, "factor": 2.0}
    digests = set()
    for _ in range(2):
        interpret(every_kind)[(1,)](x, b=y, none=None, OFFSET=3, **arguments)
        assert y.item() == 2.0 + 1 + 2 + 3 + 7 + 3
        digests.add(hashlib.sha256(aot.compile_spec(EVERY, 80).data).hexdigest())
    assert len(digests) == 1


def test_equal_specs_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = []
    original = aot.compile_spec
    monkeypatch.setattr(aot, "compile_spec", lambda spec, sm: compiled.append((spec.name, sm)) or original(spec, sm))
    seen = []
    specs = [STORE, dataclasses.replace(STORE, name="again", grid=("B", "2", "1")), EVERY]
    kernels = aot.compile_all(specs, [80, 90], progress=lambda *state: seen.append(state))
    assert compiled == [("kv_store", 80), ("kv_store", 90), ("every_kind", 80), ("every_kind", 90)]
    assert seen == [(0, 2, "kv_store"), (1, 2, "every_kind")]
    write_pack(tmp_path / "pack", kernels, compiler=aot.COMPILER)
    pack = KernelPack.open(tmp_path / "pack")
    assert pack.grid("again") == ("B", "2", "1")
    assert bytes(pack.kernel("again", 90).data) == bytes(pack.kernel("kv_store", 90).data)


def test_a_kernel_that_does_not_compile() -> None:
    spec = KernelSpec("broken", not_in_triton, {"x": "*fp32"}, {})
    with pytest.raises(LLMBuildError, match=r"a kernel does not compile.*\n  where: kernel broken, SM 90"):
        aot.compile_spec(spec, 90)


def test_triton_is_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    assert aot.triton_problem() is None
    monkeypatch.setattr(aot.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"triton 3\.6\.0 is not installed\n.*\n.*llmbuild\[cuda-build\]"):
        aot.compile_spec(EVERY, 80)
    monkeypatch.setattr(aot.metadata, "version", lambda name: "3.9.0")
    with pytest.raises(ConfigError, match=r"triton 3\.9\.0 is installed; kernels are compiled with 3\.6\.0 only"):
        aot.compile_spec(EVERY, 80)


def test_the_interpreter_of_triton_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="with TRITON_INTERPRET kernels cannot be compiled"):
        aot.compile_spec(EVERY, 80)


def test_sms() -> None:
    assert parse_sms("90,80, 80") == (80, 90)
    with pytest.raises(ConfigError, match=r"no kernels for SM 75, 87\n.*\n.*known: 80, 86, 89, 90, 100, 120"):
        parse_sms("75,90,87")
    with pytest.raises(ConfigError, match="'sm_90' is no list of SMs"):
        parse_sms("sm_90")
