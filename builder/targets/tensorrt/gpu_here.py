"""The GPU that an engine of the full TensorRT is built on, and for."""

from __future__ import annotations

from typing import NamedTuple

from llmbuild.cuda.calls import CudaError, checked, import_driver
from llmbuild.errors import DeviceError

HINT = "build on the machine that is to run the engine; --target cuda and --target tensorrt-rtx build without a GPU"


class GpuHere(NamedTuple):
    """sm: compute capability, 90 for 9.0. processors: multiprocessors."""

    name: str
    sm: int
    processors: int


def gpu_here() -> GpuHere:
    """Return the first GPU.

    Raises:
        DeviceError: There is no GPU, no driver, or no cuda-bindings.
    """
    driver = import_driver("the tensorrt target", "pip install 'llmbuild[tensorrt]'")
    kinds = driver.CUdevice_attribute
    try:
        checked(driver, "cuInit", driver.cuInit(0))
        device = checked(driver, "cuDeviceGet", driver.cuDeviceGet(0))
    except CudaError as error:
        raise DeviceError(f"TensorRT builds on a GPU, and none can be used: {error.what}", hint=HINT) from error
    except Exception as error:  # cuda.bindings found no driver library; what it raises varies with its version
        raise DeviceError("TensorRT builds on a GPU, and no NVIDIA driver is installed", hint=HINT) from error

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(driver, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(kind, device)))

    name = checked(driver, "cuDeviceGetName", driver.cuDeviceGetName(256, device)).split(b"\0")[0].decode()
    sm = 10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR")
    return GpuHere(name, sm, attribute("MULTIPROCESSOR_COUNT"))
