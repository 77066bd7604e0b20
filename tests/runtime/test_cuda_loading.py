"""What stops an engine of the cuda target from loading: each is found before weights are read, and says what to do."""

from __future__ import annotations

import builtins
import subprocess
import sys
import types
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from llmbuild.cuda import kernels as kernels_module
from llmbuild.cuda.calls import CudaError, checked
from llmbuild.cuda.kernels import Grid, KernelLauncher
from llmbuild.engine.cubin import Cubin
from llmbuild.engine.reader import open_engine
from llmbuild.errors import DeviceError, EngineError, LLMBuildError
from llmbuild.runtime.executors.cuda import driver as driver_module
from llmbuild.runtime.executors.cuda import load as load_module
from llmbuild.runtime.executors.cuda.driver import Device
from llmbuild.runtime.executors.cuda.executor import CudaExecutor
from support.cuda_engine import KERNELS, fake_gpu, kernel, launch, plan, write_cuda_engine
from support.fake_device import FakeDevice


def refused(path: Path, monkeypatch: pytest.MonkeyPatch, device: FakeDevice, **options: Any) -> EngineError:
    """Load an engine that must not load; its weights must not be read."""

    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(load_module, "Device", lambda ordinal: device)
    monkeypatch.setattr(load_module.weights, "upload", read)
    with pytest.raises(EngineError) as caught:
        CudaExecutor(open_engine(path), **options)
    assert device.closed, "what was allocated is freed"
    return caught.value


def test_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(write_cuda_engine(tmp_path / "e"), monkeypatch, fake_gpu(sm=89))
    assert error.what == "the engine holds no kernels for this GPU (SM 89); it was built for SM 90"
    assert error.hint == "convert the model again with --sm 89,90"


def test_a_driver_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(write_cuda_engine(tmp_path / "e"), monkeypatch, fake_gpu(driver_version=11080))
    assert error.what == "the NVIDIA driver is too old: it serves CUDA 11.8, the engine's kernels need 12.0"
    assert error.where == "GPU 0, Fake H1"
    assert error.hint == "install a driver for CUDA 12.0 or newer"


def test_a_kernel_that_the_pack_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logits,) = plan().buffers
    made = plan(ops=(*plan().ops, kernel("stor")), buffers=(logits.model_copy(update={"last": 4}),))
    error = refused(write_cuda_engine(tmp_path / "e", launch_plan=made), monkeypatch, fake_gpu())
    assert error.what == "the engine holds no kernel 'stor'"
    assert error.hint is not None and "did you mean 'store'?" in error.hint


def test_a_kernel_that_takes_other_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {name: launch(name, *kinds) for name, (kinds, _) in KERNELS.items()}
    kernels["store"] = launch("store", *KERNELS["store"][0], "i32")
    error = refused(write_cuda_engine(tmp_path / "e", kernels=kernels), monkeypatch, fake_gpu())
    assert error.what == "the kernel takes 6 arguments, the launch plan gives 5"
    assert error.where == "kernel store"


def test_a_kernel_that_the_driver_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_gpu()

    def load(cubin: Cubin) -> None:
        raise CudaError("cuLibraryLoadData", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "")

    device.load = load  # type: ignore[assignment, method-assign]
    error = refused(write_cuda_engine(tmp_path / "e"), monkeypatch, device)
    assert error.what == (
        "the driver cannot load the kernel hash: cuLibraryLoadData failed: CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    )
    assert error.where is not None and "CUDA 13.0" in error.where


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(write_cuda_engine(tmp_path / "e"), monkeypatch, fake_gpu(total=1 << 20))
    assert error.what.startswith("the GPU has too little free memory")


def test_memory_that_another_process_took_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_gpu(total=1 << 10)
    device.memory = lambda: (1 << 30, 1 << 30)  # type: ignore[method-assign]
    error = refused(write_cuda_engine(tmp_path / "e"), monkeypatch, device)
    assert error.what == (
        "the GPU's memory ran out while loading: cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
    )


def test_cuda_bindings_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError("No module named 'cuda'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EngineError, match="the cuda target needs the package cuda-bindings") as caught:
        Device()
    assert caught.value.hint == "pip install 'llmbuild[cuda]'"


class Code(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100


class FakeDriver(types.SimpleNamespace):
    """`cuda.bindings.driver` with no more than the start of a session."""

    def cuGetErrorString(self, code: Code) -> tuple[Code, bytes]:
        return Code.CUDA_SUCCESS, code.name.lower().encode()


@pytest.mark.parametrize(
    ("driver", "what"),
    [
        (
            FakeDriver(cuInit=lambda flags: (Code.CUDA_ERROR_NO_DEVICE,)),
            "no NVIDIA GPU can be used: cuInit failed: CUDA_ERROR_NO_DEVICE (cuda_error_no_device)",
        ),
        (
            FakeDriver(cuInit=lambda flags: (Code.CUDA_SUCCESS,), cuDeviceGetCount=lambda: (Code.CUDA_SUCCESS, 1)),
            "no GPU 1: there is 1",
        ),
    ],
)
def test_no_such_gpu(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, what: str) -> None:
    monkeypatch.setattr(driver_module, "import_driver", lambda: driver)
    with pytest.raises(DeviceError) as caught:
        Device(1)
    assert caught.value.what == what
    assert caught.value.hint is not None and "nvidia-smi" in caught.value.hint


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(flags: int) -> None:
        raise RuntimeError("libcuda.so.1 was not found")

    monkeypatch.setattr(driver_module, "import_driver", lambda: FakeDriver(cuInit=start))
    with pytest.raises(DeviceError, match="no NVIDIA driver is installed") as caught:
        Device()
    assert caught.value.where == "libcuda.so.1 was not found"


def test_a_failed_call_names_itself_and_the_reason() -> None:
    with pytest.raises(LLMBuildError) as caught:
        checked(FakeDriver(), "cuMemFree", (Code.CUDA_ERROR_INVALID_VALUE,))
    assert caught.value.what == "cuMemFree failed: CUDA_ERROR_INVALID_VALUE (cuda_error_invalid_value)"
    assert checked(FakeDriver(), "cuMemGetInfo", (Code.CUDA_SUCCESS, 1, 2)) == (1, 2)
    assert checked(FakeDriver(), "cuMemAlloc", (Code.CUDA_SUCCESS, 1)) == 1
    assert checked(FakeDriver(), "cuMemFree", (Code.CUDA_SUCCESS,)) is None


def test_a_launch_as_cuda_bindings_takes_it() -> None:
    """The structures are the real ones; only the call is not made."""
    real = pytest.importorskip("cuda.bindings.driver")
    seen = []

    def call(config: Any, function: Any, pointers: int, extra: int) -> tuple[int]:
        seen.append((config.gridDimX, config.gridDimY, config.gridDimZ, int(config.hStream), function, pointers, extra))
        return (0,)

    names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
    driver = types.SimpleNamespace(cuLaunchKernelEx=call, **{name: getattr(real, name) for name in names})
    one = launch("f", shared=70_000, num_warps=8, num_ctas=2, pdl=True, cooperative=True)
    launcher = KernelLauncher(driver, "function", one, types.SimpleNamespace(pointers=1 << 47))
    launcher(Grid(3, 5, 7), real.CUstream(99))
    assert seen == [(6, 5, 7, 99, "function", 1 << 47, 0)]
    config = launcher._config
    assert (config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes) == (256, 1, 1, 70_000)
    assert config.numAttrs == 3
    stream_serialization, cooperative, cluster = config.attrs
    assert stream_serialization.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert stream_serialization.value.programmaticStreamSerializationAllowed == 1
    assert cooperative.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert cooperative.value.cooperative == 1
    assert cluster.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert (cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z) == (2, 1, 1)
    plain = KernelLauncher(driver, "function", launch("f"), types.SimpleNamespace(pointers=0))
    assert plain._config.numAttrs == 0


def test_every_driver_function_that_is_called_exists() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    import re

    text = "".join(Path(module.__file__).read_text() for module in (driver_module, kernels_module))
    names = set(re.findall(r"\b(cu[A-Z]\w+)", text))
    assert len(names) > 30
    assert [name for name in sorted(names) if not hasattr(real, name)] == []
    constants = set(re.findall(r"\b((?:CU|CUDA)_[A-Z0-9_]+)\b", text))
    kinds = [getattr(real, name) for name in dir(real) if isinstance(getattr(real, name), type)]
    known = {member for kind in kinds for member in dir(kind)} | set(dir(real))
    # In docstrings and as values of flags that are plain integers.
    flags = {"CU_STREAM_NON_BLOCKING", "CU_EVENT_DISABLE_TIMING"}
    assert sorted(constants - known - flags) == []


SCRIPT = """
import sys
from pathlib import Path
import support.cuda_engine as made
from llmbuild.engine.reader import open_engine
from llmbuild.runtime.executors.cuda import load
from llmbuild.runtime.executors.registry import load_executor
load.Device = lambda ordinal: made.fake_gpu()
load_executor(open_engine(made.write_cuda_engine(Path(sys.argv[1]))), num_blocks=8).close()
heavy = ("torch", "triton", "transformers", "onnxruntime", "llmbuild.builder", "llmbuild.plugins")
print([name for name in sys.modules if name in heavy or name.startswith(tuple(h + "." for h in heavy))])
"""


def test_serving_imports_neither_torch_nor_triton(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "engine")],
        cwd=tests,
        env={"PYTHONPATH": str(tests), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[]\n", done.stderr
