"""Kernels on their way from the builder into an engine. A node names them by hash, as ONNX is no place for code."""

from __future__ import annotations

from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt.program import KernelSet

_KERNELS: dict[str, KernelSet] = {}


def provide(kernels: KernelSet) -> str:
    """Keep kernels for the nodes that are going to name them; return their hash, the node's attribute `kernels`."""
    return _KERNELS.setdefault(kernels.digest, kernels).digest


def find(digest: str, where: str) -> KernelSet:
    """
    Raises:
        EngineError: No such kernels were provided in this process.
    """
    if digest not in _KERNELS:
        raise EngineError(
            f"the node names kernels {digest[:12]}..., which nobody provided",
            where=where,
            hint="build the engine with llmbuild: the ONNX file alone holds no kernels",
        )
    return _KERNELS[digest]
