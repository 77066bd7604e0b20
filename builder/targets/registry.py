"""The table of targets. A target is imported when it is asked for, so that listing them imports nothing heavy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llmbuild.errors import ConfigError, nearest

if TYPE_CHECKING:
    from llmbuild.builder.targets.base import Target

# name -> "module:class". Adding a target is this line and a folder of its own.
TARGETS: dict[str, str] = {
    "cpu": "llmbuild.builder.targets.cpu.target:CpuTarget",
    "cuda": "llmbuild.builder.targets.cuda.target:CudaTarget",
    "tensorrt": "llmbuild.builder.targets.tensorrt.target:TensorRTTarget",
    "tensorrt-rtx": "llmbuild.builder.targets.tensorrt.rtx:RtxTarget",
}


def find_target(name: str) -> Target:
    """Import and return the target called `name`.

    Raises:
        ConfigError: no target has that name; the hint lists the known ones.
    """
    try:
        module, _, attribute = TARGETS[name].partition(":")
    except KeyError:
        raise ConfigError(f"unknown target {name!r}", where="--target", hint=nearest(name, list(TARGETS))) from None
    target: Target = getattr(importlib.import_module(module), attribute)()
    return target
