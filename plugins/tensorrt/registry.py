"""Makes the plugins known to TensorRT, once a process."""

from __future__ import annotations

from functools import cache
from typing import Any

from llmbuild.errors import ConfigError, EngineError
from llmbuild.plugins.tensorrt.bindings import INSTALL, WHERE, bindings, require_stored
from llmbuild.plugins.tensorrt.form import NAMESPACE, STORED, VERSION


@cache
def register() -> Any:
    """Register the creator of PagedAttention and return it. A second call does nothing.

    Raises:
        ConfigError: There are no bindings that would do, see `find_bindings`, or no library behind them.
        EngineError: Another plugin of this name and version is registered already.
    """
    module = bindings().module
    from llmbuild.plugins.tensorrt.plugin import PagedAttentionCreator

    return _registered(module, PagedAttentionCreator())


@cache
def register_stored() -> list[Any]:
    """Register the creators of PagedStore and PagedAttend and return them; engines that hold these do not need it.

    Raises:
        ConfigError: As `bindings.require_stored`, or there is no library behind the bindings.
        EngineError: Another plugin of such a name and version is registered already.
    """
    module = require_stored().module
    from llmbuild.plugins.tensorrt.stored_plugin import StoredCreator

    return [_registered(module, StoredCreator(role)) for role in STORED]


def _registered(module: Any, creator: Any) -> Any:
    registry = module.get_plugin_registry()
    if registry is None:
        raise ConfigError("TensorRT has no registry of plugins: its library is missing", where=WHERE, hint=INSTALL)
    if not registry.register_creator(creator, NAMESPACE):
        raise EngineError(
            f"TensorRT has another plugin {NAMESPACE}::{creator.name}, version {VERSION}, already",
            where=WHERE,
            hint="import llmbuild before other packages that bring it, or leave them out",
        )
    return creator
