"""Makes the plugin known to TensorRT, once a process."""

from __future__ import annotations

from functools import cache
from typing import Any

from llmbuild.errors import ConfigError, EngineError
from llmbuild.plugins.tensorrt.bindings import INSTALL, WHERE, bindings
from llmbuild.plugins.tensorrt.form import NAME, NAMESPACE, VERSION


@cache
def register() -> Any:
    """Register the creator of PagedAttention and return it. A second call does nothing.

    Raises:
        ConfigError: There are no bindings that would do, see `find_bindings`, or no library behind them.
        EngineError: Another plugin of this name and version is registered already.
    """
    module = bindings().module
    from llmbuild.plugins.tensorrt.plugin import PagedAttentionCreator

    registry = module.get_plugin_registry()
    if registry is None:
        raise ConfigError("TensorRT has no registry of plugins: its library is missing", where=WHERE, hint=INSTALL)
    creator = PagedAttentionCreator()
    if not registry.register_creator(creator, NAMESPACE):
        raise EngineError(
            f"TensorRT has another plugin {NAMESPACE}::{NAME}, version {VERSION}, already",
            where=WHERE,
            hint="import llmbuild before other packages that bring it, or leave them out",
        )
    return creator
