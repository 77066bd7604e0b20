"""TensorRT absent, broken, too old, too new, or of the kind that takes no plugins: what the user is told."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
from packaging.version import Version

from llmbuild.errors import ConfigError
from llmbuild.plugins.tensorrt import bindings as module
from llmbuild.plugins.tensorrt.bindings import CLASSES, Bindings, find_bindings, require_plugins

EXTRA = "pip install 'llmbuild[tensorrt]'"


def library(version: str, *, network: bool = True, without: tuple[str, ...] = ()) -> types.SimpleNamespace:
    names = {name: object for name in CLASSES if name not in without}
    kind = type("INetworkDefinition", (), {"add_plugin_v3": None} if network else {})
    return types.SimpleNamespace(__version__=version, INetworkDefinition=kind, **names)


def installed(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Let imports find these modules, and raise those that are errors."""

    def find(name: str) -> Any:
        found = modules.get(name, ModuleNotFoundError(f"No module named {name!r}", name=name))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(importlib, "import_module", find)


def refusal(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> ConfigError:
    installed(monkeypatch, **modules)
    with pytest.raises(ConfigError) as info:
        find_bindings()
    return info.value


def test_neither_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch)
    assert error.what == "TensorRT 10.15 to 11.x is needed and not installed"
    assert error.hint == EXTRA


@pytest.mark.parametrize("version", ["8.6.1", "10.13.3.9", "10.14.1.48"])
def test_too_old(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, tensorrt=library(version))
    assert error.what == f"tensorrt {version} is too old: 10.15 to 11.x will do"
    assert error.hint == f"{EXTRA} --upgrade"


def test_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, tensorrt=library("12.0.0.1"))
    assert error.what == "tensorrt 12.0.0.1 is too new: 10.15 to 11.x will do, later ones are not known"
    assert error.hint == "pip install 'tensorrt>=10.15,<12', or a newer llmbuild"


@pytest.mark.parametrize("version", ["10.15.1.29", "10.16.1.11", "11.4.0.106"])
def test_the_full_package_comes_first(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tensorrt=library(version), tensorrt_rtx=library("1.7.1.116", network=False))
    found = find_bindings()
    assert (found.package, found.version, found.takes_plugins) == ("tensorrt", Version(version), True)


def test_rtx_alone_serves_all_but_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tensorrt_rtx=library("1.7.1.116", network=False))
    found = find_bindings()
    monkeypatch.setattr(module, "bindings", lambda: found)
    with pytest.raises(ConfigError) as info:
        require_plugins()
    assert info.value.what == (
        "tensorrt-rtx 1.7.1.116 takes no plugins: engines with PagedAttention need tensorrt 10.15 to 11.x"
    )
    assert info.value.hint == f"{EXTRA} (wheels from NVIDIA's index), or --target tensorrt-rtx"


def test_what_takes_plugins_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Bindings(library("11.4"), "tensorrt", Version("11.4"))
    monkeypatch.setattr(module, "bindings", lambda: found)
    assert require_plugins() is found


def test_installed_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, tensorrt=ImportError("libnvinfer.so.11: cannot open shared object file"))
    assert error.what == "TensorRT is installed and does not load"
    assert error.where == "tensorrt: libnvinfer.so.11: cannot open shared object file"
    inside = ModuleNotFoundError("No module named 'tensorrt_bindings'", name="tensorrt_bindings")
    assert "No module named 'tensorrt_bindings'" in str(refusal(monkeypatch, tensorrt=inside).where)


def test_bindings_that_lack_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, tensorrt=library("11.0", without=("IPluginV3OneBuildV2",)))
    assert error.what == "tensorrt 11.0 has no IPluginV3OneBuildV2"
    error = refusal(monkeypatch, tensorrt_rtx=library("1.0", without=("IPluginV3",)))
    assert (error.what, error.hint) == ("tensorrt-rtx 1.0 has no IPluginV3", "pip install 'tensorrt-rtx>=1.4'")
    assert refusal(monkeypatch, tensorrt=library("")).what == "tensorrt has no version: ''"
