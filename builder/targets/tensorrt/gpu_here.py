"""The GPU that an engine of the full TensorRT is built on, and for."""

from __future__ import annotations

from typing import NamedTuple

from llmbuild.cuda.calls import (
    CudaError,
    checked,
    compute_capability,
    device_attribute,
    device_name,
    import_driver,
)
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
    try:
        checked(driver, "cuInit", driver.cuInit(0))
        device = checked(driver, "cuDeviceGet", driver.cuDeviceGet(0))
    except CudaError as error:
        raise DeviceError(f"TensorRT builds on a GPU, and none can be used: {error.what}", hint=HINT) from error
    except Exception as error:  # cuda.bindings found no driver library; what it raises varies with its version
        raise DeviceError("TensorRT builds on a GPU, and no NVIDIA driver is installed", hint=HINT) from error
    processors = device_attribute(driver, device, "MULTIPROCESSOR_COUNT")
    return GpuHere(device_name(driver, device), compute_capability(driver, device), processors)
