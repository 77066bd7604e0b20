"""Kernels on their way from the builder into an engine. A node names them by hash, as ONNX is no place for code."""

from __future__ import annotations

from typing import TypeVar

from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt.program import KernelSet
from llmbuild.plugins.tensorrt.stored import StoredKernel

Kept = TypeVar("Kept", KernelSet, StoredKernel)
_KERNELS: dict[str, KernelSet | StoredKernel] = {}


def provide(kernels: KernelSet | StoredKernel) -> str:
    """Keep kernels for the nodes that are going to name them; return their hash, the node's attribute `kernels`."""
    return _KERNELS.setdefault(kernels.digest, kernels).digest


def find(digest: str, kind: type[Kept], where: str) -> Kept:
    """
    Raises:
        EngineError: No such kernels of that kind were provided in this process.
    """
    found = _KERNELS.get(digest)
    if not isinstance(found, kind):
        raise EngineError(
            f"the node names kernels {digest[:12]}..., which nobody provided",
            where=where,
            hint="build the engine with llmbuild: the ONNX file alone holds no kernels",
        )
    return found
