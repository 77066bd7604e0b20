"""In the place of what tensorrt-rtx lacks of plugins whose kernels an engine stores: the classes and enumerations that
TensorRT's own bindings have under the same names. Nothing calls them but the tests."""

from __future__ import annotations

import enum
from typing import Any

QuickPluginCreationRequest = enum.Enum(
    "QuickPluginCreationRequest", "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT", start=0
)


class ISymExpr:
    type: Any
    dtype: Any
    expr: Any


def add_to(module: Any) -> None:
    """Give bindings what they lack."""
    if hasattr(module, "IPluginV3QuickAOTBuild"):
        return

    class IPluginV3QuickAOTBuild(module.IPluginV3QuickBuild):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IPluginV3QuickBuild.__init__(self)

    module.IPluginV3QuickAOTBuild = IPluginV3QuickAOTBuild
    module.ISymExpr = ISymExpr
    module.QuickPluginCreationRequest = QuickPluginCreationRequest
