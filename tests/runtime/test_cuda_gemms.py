"""cuBLASLt: rows against columns, the real library's opinion of what it is told, and which algorithm is taken."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbuild.engine.launch_plan import Limits, Place
from llmbuild.errors import EngineError, LLMBuildError
from llmbuild.plugins.kernels.number_formats import float32_to_float8
from llmbuild.runtime.executors.cuda import gemms as gemms_module
from llmbuild.runtime.executors.cuda.cublaslt import CublasLt, Extras, GemmShape, Matmul, library_files, library_version
from llmbuild.runtime.executors.cuda.gemm_memory import GemmMemory, shape_key
from llmbuild.runtime.executors.cuda.gemms import Gemms, alignment, open_library, row_bucket
from support.cuda_engine import gemm, place
from support.fake_cublaslt import FakeCublasLt
from support.fake_device import FakeDevice

LIMITS = Limits(max_num_tokens=32, max_batch_size=8, table_stride=4, block_size=16)
SECTION = "cuBLASLt 130100, Fake H1"


class Bench:
    """A fake GPU with the arrays of one GEMM: x, w, bias and out, each in an allocation that holds no more."""

    def __init__(self, *paths: Path, tune: bool = False, algos: int = 3, **sizes: int) -> None:
        self.device = FakeDevice()
        self.library = FakeCublasLt(self.device, algos=algos)
        self.sizes = sizes
        self.at = {name: self.device.allocate(4 * size) for name, size in sizes.items()}
        for name in sizes:
            self.array(name)[:] = 0
        workspace = self.device.allocate(1 << 16)
        self.gemms = Gemms(
            self.device,  # type: ignore[arg-type]
            CublasLt(self.library),
            workspace,
            1 << 16,
            limits=LIMITS,
            tune=tune,
            memory=GemmMemory(SECTION, paths),
        )

    def address(self, at: Place) -> int:
        return self.at[at.name] + at.offset

    def array(self, name: str) -> np.ndarray:
        return self.device.view(self.at[name], 4 * self.sizes[name]).view(np.float32)

    def run(self, op: Any, rows: int) -> None:
        bound = self.gemms.add(op, self.address)
        self.gemms.prepare(bound, rows, 0)
        self.gemms.run(bound, rows, 0)


CASES = {
    "plain": {},
    "bias": {"bias": place("weight", "bias")},
    "padded rows": {"x_stride": 11, "weight_stride": 9, "out_stride": 7},
    "weights by column": {"weight_layout": "kn", "weight_stride": 5},
    "weights by column, padded": {"weight_layout": "kn", "weight_stride": 6, "bias": place("weight", "bias")},
    "batched": {"batch": 3, "x_batch": 9 * 8, "weight_batch": 5 * 8, "out_batch": 9 * 5},
    "one weight for the batch": {"batch": 2, "x_batch": 9 * 8, "out_batch": 9 * 5, "bias": place("weight", "bias")},
    "batch inside the rows": {"batch": 2, "x_stride": 16, "x_batch": 8, "out_stride": 10, "out_batch": 5},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 9])
def test_the_product_by_rows_is_the_product_by_columns(case: str, rows: int) -> None:
    op = gemm(**CASES[case])
    nk = op.weight_layout == "nk"
    lines, width = (op.n, op.k) if nk else (op.k, op.n)
    bench = Bench(
        x=(op.batch - 1) * op.x_batch + (rows - 1) * op.x_stride + op.k,
        w=(op.batch - 1) * op.weight_batch + (lines - 1) * op.weight_stride + width,
        out=(op.batch - 1) * op.out_batch + (rows - 1) * op.out_stride + op.n,
        bias=op.n,
    )
    rng = np.random.default_rng(rows)
    for name in ("x", "w", "bias"):
        bench.array(name)[:] = rng.integers(-9, 9, bench.sizes[name])
    bench.array("out")[:] = 1234
    expected = bench.array("out").copy()
    x, w, bias = (bench.array(name) for name in ("x", "w", "bias"))
    for i in range(op.batch):
        for m in range(rows):
            for n in range(op.n):
                row = x[i * op.x_batch + m * op.x_stride :][: op.k]
                at = i * op.weight_batch
                one = w[at + n * op.weight_stride :][: op.k] if nk else w[at + n :: op.weight_stride][: op.k]
                total = row @ one + (bias[n] if op.bias is not None else 0)
                expected[i * op.out_batch + m * op.out_stride + n] = total
    bench.run(op, rows)
    np.testing.assert_array_equal(bench.array("out"), expected)  # what lies between the rows is untouched, too
    bench.gemms.close()
    assert not bench.library.objects, "every descriptor is destroyed"


def test_float8_counts_its_scales_and_the_result_is_wider() -> None:
    """outᵀ = diag(weight scales) · W · xᵀ · diag(x scales), of numbers whose sums are exact."""
    rows, op = (
        9,
        gemm(number_dtype="float8_e4m3fn", x_scale=place("buffer", "x_scale"), weight_scale=place("weight", "w_scale")),
    )
    bench = Bench(x=rows * 8, w=5 * 8, out=rows * 5, x_scale=rows, w_scale=5)
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-8, 9, (lines, 8)).astype(np.float32) for lines in (rows, 5))
    for name, values in (("x", x), ("w", w)):
        bench.device.view(bench.at[name], values.size)[:] = float32_to_float8(values).reshape(-1)
    for name in ("x_scale", "w_scale"):
        bench.array(name)[:] = 2.0 ** rng.integers(-3, 4, bench.sizes[name])
    bench.run(op, rows)
    expected = (x @ w.T) * bench.array("x_scale")[:, None] * bench.array("w_scale")
    np.testing.assert_array_equal(bench.array("out").reshape(rows, 5), expected)
    bench.gemms.close()


def test_a_library_without_scales_of_rows_is_refused() -> None:
    device = FakeDevice()
    lt = CublasLt(FakeCublasLt(device, version=120800))
    with pytest.raises(EngineError, match="120800 has no scales for rows of 8-bit floats"):
        Matmul(lt, shape(number_dtype="float8_e4m3fn", has_scales=True), 9, (0, 0))


def shape(**changes: Any) -> GemmShape:
    op = gemm()
    fields = {name: getattr(op, name) for name in GemmShape._fields if hasattr(op, name)}
    return GemmShape(**{**fields, "has_bias": False, "align_a": 16, "align_b": 16, "align_d": 16, **changes})


@pytest.mark.skipif(not library_files(), reason="nvidia-cublas is not installed")
def test_the_real_library_takes_every_attribute() -> None:
    """Descriptors and layouts need no GPU: only the handle does."""
    library = ctypes.CDLL(str(library_files()[0]))

    class Handless(CublasLt):
        def __init__(self) -> None:
            self._library = library
            self.version = library_version(library)

    lt = Handless()
    assert lt.version >= 130000
    for dtype in ("float32", "float16", "bfloat16"):
        one = shape(dtype=dtype, has_bias=True, batch=2, x_batch=64, weight_batch=40, out_batch=45)
        matmul = Matmul(lt, one, 9, (0, 0))
        matmul._set_extras(Extras(bias=0x7F00_0000_0100))
        matmul.close()
    matmul = Matmul(lt, shape(dtype="bfloat16", number_dtype="float8_e4m3fn", has_scales=True), 9, (0, 0))
    matmul._set_extras(Extras(x_scale=0x7F00_0000_0100, weight_scale=0x7F00_0000_0200))
    matmul.close()
    preference = lt.new("MatmulPreference")
    for attribute, value in (
        (1, ctypes.c_uint64(1 << 25)),
        (3, ctypes.c_uint32(2)),
        *((each, ctypes.c_uint32(16)) for each in (5, 6, 7, 8)),
    ):
        lt.set("MatmulPreference", preference, attribute, value)
    with pytest.raises(LLMBuildError, match="CUBLAS_STATUS_INVALID_VALUE"):
        lt.set("MatmulPreference", preference, 1, ctypes.c_uint32(1))
    lt.delete("MatmulPreference", preference)


def test_a_dtype_that_is_not_computed() -> None:
    device = FakeDevice()
    with pytest.raises(LLMBuildError, match="computes no GEMM of float8_e4m3fn"):
        Matmul(CublasLt(FakeCublasLt(device)), shape(dtype="float8_e4m3fn"), 1, (0, 0))


def times(bench: Bench, milliseconds: list[float]) -> None:
    """Let the next timings come out like this."""
    left = iter(milliseconds)
    bench.device.elapsed = lambda start, end: next(left)  # type: ignore[method-assign]


def tuned(*paths: Path, **options: Any) -> Bench:
    return Bench(*paths, tune=True, x=32 * 8, w=40, out=32 * 5, **options)


def test_the_quickest_algorithm_is_taken_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "engine.gemm.json"
    first = tuned(path)
    times(first, [3.0, 1.0, 2.0])
    first.run(gemm(), 9)
    assert first.library.matmuls[-1] == 2 and first.library.heuristics == 1
    first.run(gemm(), 10)  # the same bucket, 16
    assert first.library.heuristics == 1
    assert row_bucket(9, 32) == row_bucket(10, 32) == 16
    first.gemms.close()
    assert list(json.loads(path.read_text())) == [SECTION]
    assert not first.device.open_handles

    second = tuned(path)
    second.run(gemm(), 9)
    assert second.library.matmuls == [2] and second.library.heuristics == 0


def test_a_remembered_algorithm_that_the_library_refuses_is_chosen_again(tmp_path: Path) -> None:
    path = tmp_path / "engine.gemm.json"
    first = tuned(path)
    times(first, [3.0, 1.0, 2.0])
    first.run(gemm(), 9)
    first.gemms.close()
    second = tuned(path, algos=1)
    second.library.rejected = {2}
    second.run(gemm(), 9)
    assert second.library.matmuls[-1] == 1


def test_without_tuning_the_library_s_favourite_is_taken_and_nothing_is_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "memory.json", x=256, w=40, out=160)
    bench.run(gemm(), 9)
    bench.gemms.close()
    assert bench.library.matmuls == [1] and not (tmp_path / "memory.json").exists()


def test_no_algorithm_at_all() -> None:
    with pytest.raises(LLMBuildError, match="cuBLASLt has no algorithm for m=16 n=5 k=8"):
        Bench(algos=0, x=256, w=40, out=160).run(gemm(), 9)


def test_the_cache_is_used_when_the_engine_s_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    paths = (tmp_path / "file" / "engine.gemm.json", tmp_path / "cache" / "gemm.json")
    memory = GemmMemory(SECTION, paths)
    key = shape_key(shape(), 4)
    memory.put(key, bytes(range(64)))
    memory.save()
    assert paths[1].exists()
    assert GemmMemory(SECTION, paths).get(key) == bytes(range(64))
    assert GemmMemory("cuBLASLt 130200, Fake H1", paths).get(key) is None


def test_a_damaged_memory_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "gemm.json"
    for content in ("{", "[]", json.dumps({SECTION: {"a": "zz", "b": 3, "c": "00" * 63}})):
        path.write_text(content)
        memory = GemmMemory(SECTION, (path,))
        assert [memory.get(key) for key in "abc"] == [None] * 3


def test_alignment() -> None:
    assert [alignment(at) for at in (0x7F0000000100, 0x7F0000000110, 0x7F0000000002, 0)] == [256, 16, 2, 256]


def test_buckets_of_rows_never_pass_what_the_memory_holds() -> None:
    assert [row_bucket(rows, 5000) for rows in (1, 3, 33, 4097, 5000)] == [1, 4, 48, 5000, 5000]


def test_a_library_that_is_newer_than_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(driver_version=12080)
    monkeypatch.setattr(gemms_module, "find_library", lambda: FakeCublasLt(device))
    with pytest.raises(EngineError, match=r"it serves CUDA 12.8, the installed cuBLASLt is of CUDA 13") as caught:
        open_library(device)  # type: ignore[arg-type]
    assert caught.value.hint == "install a driver for CUDA 13.0 or newer"
