"""Which TensorRT bindings there are, and whether the plugin can live in them.

The plugin is written against what `tensorrt` 10.15 to 11 and `tensorrt-rtx` share. The latter holds the plugin classes
and the registry, yet takes no plugin into a network: with it the class is made and checked, no engine is built.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from llmbuild.errors import ConfigError

OLDEST, NEXT = Version("10.15"), Version("12")
INSTALL = "pip install 'llmbuild[tensorrt]'"
WHERE = "TensorRT"
# What the plugin is made of. Old and stripped builds of the bindings lack some of it.
CLASSES = (
    "IPluginV3",
    "IPluginV3OneCore",
    "IPluginV3OneBuildV2",
    "IPluginV3OneRuntime",
    "IPluginCreatorV3One",
    "PluginField",
    "PluginFieldCollection",
    "get_plugin_registry",
)
# What plugins are made of whose kernels an engine stores. TensorRT 10.14 has them and does not build with them.
STORED_CLASSES = (
    "IPluginV3QuickCore",
    "IPluginV3QuickAOTBuild",
    "IPluginCreatorV3Quick",
    "ISymExpr",
    "QuickPluginCreationRequest",
)


class Bindings(NamedTuple):
    """module: `tensorrt` or `tensorrt_rtx`, imported. package: what pip calls it. version: of it."""

    module: Any
    package: str
    version: Version

    @property
    def takes_plugins(self) -> bool:
        """Whether a network of these bindings can hold a plugin."""
        return hasattr(self.module.INetworkDefinition, "add_plugin_v3")


def find_bindings() -> Bindings:
    """Return `tensorrt` where it is installed, else `tensorrt_rtx`.

    Raises:
        ConfigError: Neither is installed, what is installed does not load, or its version will not do.
    """
    failures = []
    for name, package in (("tensorrt", "tensorrt"), ("tensorrt_rtx", "tensorrt-rtx")):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] != name:
                failures.append(f"{package}: {error}")  # installed, but not what it needs
            continue
        except Exception as error:  # ImportError where a library is missing; some versions raise others
            failures.append(f"{package}: {error}")
            continue
        return checked_bindings(module, package)
    if failures:
        raise ConfigError("TensorRT is installed and does not load", where="; ".join(failures), hint=INSTALL)
    raise ConfigError(f"TensorRT {OLDEST} to {NEXT.major - 1}.x is needed and not installed", where=WHERE, hint=INSTALL)


def checked_bindings(module: Any, package: str) -> Bindings:
    """Return the bindings if their version will do; see `find_bindings` for the errors."""
    text = str(getattr(module, "__version__", ""))
    try:
        version = Version(text)
    except InvalidVersion:
        raise ConfigError(f"{package} has no version: {text!r}", where=WHERE, hint=INSTALL) from None
    if package == "tensorrt":
        range_text = f"{OLDEST} to {NEXT.major - 1}.x"
        if version < OLDEST:
            raise ConfigError(
                f"tensorrt {version} is too old: {range_text} will do",
                where=WHERE,
                hint=f"{INSTALL} --upgrade",
            )
        if version >= NEXT:
            raise ConfigError(
                f"tensorrt {version} is too new: {range_text} will do, later ones are not known",
                where=WHERE,
                hint=f"pip install 'tensorrt>={OLDEST},<{NEXT}', or a newer llmbuild",
            )
    if missing := [name for name in CLASSES if not hasattr(module, name)]:
        raise ConfigError(
            f"{package} {version} has no {', '.join(missing)}",
            where=WHERE,
            hint=f"{INSTALL} --upgrade" if package == "tensorrt" else "pip install 'tensorrt-rtx>=1.4'",
        )
    return Bindings(module, package, version)


@cache
def bindings() -> Bindings:
    """Return what `find_bindings` found first; errors are not remembered."""
    return find_bindings()


def require_plugins() -> Bindings:
    """Return bindings whose networks take plugins: those of the full TensorRT.

    Raises:
        ConfigError: As `find_bindings`, or only tensorrt-rtx is installed.
    """
    found = bindings()
    if not found.takes_plugins:
        raise ConfigError(
            f"{found.package} {found.version} takes no plugins: engines with PagedAttention need tensorrt {OLDEST} to "
            f"{NEXT.major - 1}.x",
            where=WHERE,
            hint=f"{INSTALL} (wheels from NVIDIA's index), or --target tensorrt-rtx",
        )
    return found


def require_stored() -> Bindings:
    """Return bindings in whose engines kernels can be stored.

    Raises:
        ConfigError: As `require_plugins`, or they have no such plugins.
    """
    return checked_stored(require_plugins())


def checked_stored(found: Bindings) -> Bindings:
    """Return the bindings if they have the classes of such plugins; raise as `require_stored` if not."""
    if missing := [name for name in STORED_CLASSES if not hasattr(found.module, name)]:
        raise ConfigError(
            f"{found.package} {found.version} cannot store kernels in an engine: it has no {', '.join(missing)}",
            where=WHERE,
            hint="leave the builder option attention=stored out",
        )
    return found
