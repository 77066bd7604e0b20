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
