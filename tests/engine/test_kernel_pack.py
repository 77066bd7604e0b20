"""The file of compiled kernels: what goes in comes out, the same goes in the same bytes, damage is told."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from llmbuild.engine.cubin import Cubin, Launch, Parameter, TensorMap
from llmbuild.engine.kernel_pack import ALIGNMENT, CompiledKernel, KernelPack, write_pack
from llmbuild.errors import EngineError

PARAMETERS = (
    Parameter(name="x.map", kind="tensormap", offset=0, size=128),
    Parameter(name="n", kind="i32", offset=128, size=4),
    Parameter(name="global_scratch", kind="scratch", offset=136, size=8),
    Parameter(name="profile_scratch", kind="scratch", offset=144, size=8),
)
MAP = TensorMap(argument="x", element=9, element_size=2, swizzle=3, block=(64, 64))


def cubin(sm: int, data: bytes) -> Cubin:
    launch = Launch(
        sm=sm,
        symbol="f",
        shared=1024,
        num_warps=4,
        num_ctas=1,
        global_scratch=0,
        global_scratch_align=1,
        pdl=True,
        cooperative=False,
        parameters=PARAMETERS,
        tensor_maps=(MAP,),
    )
    return Cubin(launch, data)


def kernel(name: str, *, sms: tuple[int, ...] = (80, 90), code: bytes = b"code of ") -> CompiledKernel:
    grid = ("cdiv(T, 16)", "2", "1")
    return CompiledKernel(name, grid, {sm: cubin(sm, code + f"{name} {sm}".encode()) for sm in sms})


KERNELS = [kernel("norm"), kernel("attention", code=bytes(range(256)) * 9), kernel("empty", code=b"")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_pack(tmp_path / "kernels.bin", KERNELS, compiler="triton 3.6.0")
    return tmp_path / "kernels.bin"


def test_round_trip(path: Path) -> None:
    pack = KernelPack.open(path)
    assert pack.names == ("attention", "empty", "norm")
    assert pack.sms == (80, 90)
    assert pack.compiler == "triton 3.6.0"
    for one in KERNELS:
        assert pack.grid(one.name) == one.grid
        for sm, expected in one.cubins.items():
            found = pack.kernel(one.name, sm)
            assert found.launch == expected.launch
            assert bytes(found.data) == expected.data


def test_code_is_aligned_and_equal_code_is_held_once(tmp_path: Path) -> None:
    same = cubin(80, b"x" * 5000)
    write_pack(tmp_path / "one", [CompiledKernel("a", ("1", "1", "1"), {80: same})], compiler="c")
    pair = [CompiledKernel(name, ("1", "1", "1"), {80: same}) for name in "ab"]
    write_pack(tmp_path / "two", pair, compiler="c")
    assert (tmp_path / "two").stat().st_size - (tmp_path / "one").stat().st_size < 1000
    content = (tmp_path / "two").read_bytes()
    assert content.index(b"x" * 5000) % ALIGNMENT == 0


def test_the_order_plays_no_part(path: Path, tmp_path: Path) -> None:
    write_pack(tmp_path / "again", KERNELS[::-1], compiler="triton 3.6.0")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_an_empty_pack(tmp_path: Path) -> None:
    write_pack(tmp_path / "empty", [], compiler="c")
    assert KernelPack.open(tmp_path / "empty").names == ()


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kernels of the same name: norm"):
        write_pack(tmp_path / "k", [kernel("norm"), kernel("norm")], compiler="c")
    with pytest.raises(ValueError, match=r"for other SMs than \(80, 90\): b"):
        write_pack(tmp_path / "k", [kernel("a"), kernel("b", sms=(90,))], compiler="c")


def test_an_sm_that_is_not_there(path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        KernelPack.open(path).kernel("norm", 89)
    assert "holds no kernels for this GPU (SM 89); it was built for SM 80, 90" in str(caught.value)
    assert "convert the model again with --sm 80,89,90" in str(caught.value)


def test_a_kernel_that_is_not_there(path: Path) -> None:
    with pytest.raises(EngineError, match="no kernel 'nrom'") as caught:
        KernelPack.open(path).kernel("nrom", 90)
    assert "did you mean 'norm'?" in str(caught.value)


def test_truncation_is_noticed_wherever_it_is(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    cut = tmp_path / "cut"
    for length in {*range(20), *range(20, len(content), 251), *range(len(content) - 20, len(content))}:
        cut.write_bytes(content[:length])
        with pytest.raises(EngineError, match=rf"truncated kernels: {length} bytes of \d+"):
            KernelPack.open(cut)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llmbkern", b"llmbkorn", "not a file of compiled kernels"),
        (struct.pack("<I", 1), struct.pack("<I", 2), "kernels in format version 2; this llmbuild reads version 1"),
        (b'"num_warps":4', b'"num_warps":0', r"damaged kernels: kernels.0.code.0.launch.num_warps"),
        (b'"num_ctas":1', b'"num_ctaz":1', r"damaged kernels: kernels.0.code.0.launch.num_ctas"),
        (b'{"compiler"', b'["compiler"', "damaged kernels: header"),
        (b'"sms":[80,90]', b'"sms":[80,89]', "damaged kernels: SMs of attention"),
        (b"cdiv(T, 16)", b"cdiv(X, 16)", "holds 'X', which no size may"),
    ],
)
def test_damage(path: Path, old: bytes, new: bytes, message: str) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(EngineError, match=message):
        KernelPack.open(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot read the kernels: No such file"):
        KernelPack.open(tmp_path / "none")


def test_reading_needs_neither_triton_nor_torch(path: Path) -> None:
    code = (
        "import sys\n"
        "from llmbuild.engine.kernel_pack import KernelPack\n"
        f"assert KernelPack.open({str(path)!r}).kernel('norm', 90).launch.pdl\n"
        "assert not {'torch', 'triton', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
