"""The machine of a self-test: versions, and the GPU or why there is none."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import llmbuild
from llmbuild.errors import LLMBuildError

PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "onnx",
    "onnx-graphsurgeon",
    "onnxruntime",
    "triton",
    "tensorrt",
    "tensorrt-rtx",
    "cuda-bindings",
    "nvidia-cublas",
)


class Gpu(NamedTuple):
    """sm: compute capability, 90 for 9.0. cuda: newest that the driver serves, "13.0". memory: (free, all) bytes."""

    name: str
    sm: int
    cuda: str
    memory: tuple[int, int]


def find_gpu() -> Gpu | str:
    """Return the first GPU, or why there is none."""
    from llmbuild.runtime.executors.cuda.checks import version_text
    from llmbuild.runtime.executors.cuda.driver import Device

    try:
        device = Device(0)
    except LLMBuildError as error:
        return error.what + (f" ({error.where})" if error.where else "")
    try:
        return Gpu(device.name, device.sm, version_text(device.driver_version), device.memory())
    finally:
        device.close()


def installed() -> dict[str, str | None]:
    """Return the version of each of PACKAGES; None for what is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def environment(gpu: Gpu | str) -> dict[str, Any]:
    """Return what a report says of the machine; no names of users or hosts."""
    return {
        "llmbuild": llmbuild.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": installed(),
        "gpu": gpu._asdict() if isinstance(gpu, Gpu) else None,
        "no_gpu": None if isinstance(gpu, Gpu) else gpu,
    }
