"""The driver as `cuda.bindings` gives it: imported when it is used, every call checked."""

from __future__ import annotations

from typing import Any

from llmbuild.errors import DeviceError, LLMBuildError

INSTALL = "pip install 'llmbuild[cuda]'"


class CudaError(LLMBuildError):
    """A call of the CUDA driver failed. call: its name. code: the driver's, "CUDA_ERROR_INVALID_VALUE"."""

    def __init__(self, call: str, code: str, meaning: str) -> None:
        super().__init__(f"{call} failed: {code}" + (f" ({meaning})" if meaning else ""), where="CUDA driver")
        self.call = call
        self.code = code


def import_driver(user: str = "the cuda target", install: str = INSTALL) -> Any:
    """Return `cuda.bindings.driver`.

    Args:
        user: What needs it, and `install` how to get it: for the message.

    Raises:
        DeviceError: cuda-bindings is not installed, or does not load.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"{user} needs the package cuda-bindings", where=str(error) or None, hint=install) from error
    return driver


def checked(driver: Any, name: str, result: tuple[Any, ...]) -> Any:
    """Return what a call returned besides its code: nothing, a value, or a tuple of values.

    Raises:
        CudaError: The code is not success.
    """
    code, *values = result
    if int(code) != 0:
        label = getattr(code, "name", str(code))
        _, text = driver.cuGetErrorString(code)
        raise CudaError(name, label, text.decode() if isinstance(text, bytes) else "")
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def device_attribute(driver: Any, device: Any, name: str) -> int:
    """Return an attribute of a GPU. name: without the prefix that all have, "MULTIPROCESSOR_COUNT"."""
    kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(checked(driver, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(kind, device)))


def compute_capability(driver: Any, device: Any) -> int:
    """Return 90 for 9.0."""
    major, minor = (device_attribute(driver, device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return 10 * major + minor


def device_name(driver: Any, device: Any) -> str:
    """Return what the driver calls a GPU."""
    found: bytes = checked(driver, "cuDeviceGetName", driver.cuDeviceGetName(256, device))
    return found.split(b"\0")[0].decode()
