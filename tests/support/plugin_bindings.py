"""TensorRT's bindings for the tests of the plugins, and the plugins' modules in them.

`tensorrt-rtx` where nothing else is said. LLMBUILD_TENSORRT_BINDINGS names a folder that tools/tensorrt_bindings.py
made: the bindings of any version of either package, with a library in place of TensorRT's that has its few functions
and does nothing. What is tested is the same: the plugin's classes live in the bindings.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from support.standin.quick_classes import add_to

FOLDER = os.environ.get("LLMBUILD_TENSORRT_BINDINGS")

if importlib.util.find_spec("tensorrt") is None and importlib.util.find_spec("tensorrt_rtx") is None:
    pytest.skip("neither tensorrt nor tensorrt-rtx is installed", allow_module_level=True)

plugin_module: Any = importlib.import_module("llmbuild.plugins.tensorrt.plugin")
trt: Any = plugin_module.trt
# tests/plugins_tensorrt/conftest.py puts the folder where bindings are looked for, before anything looks.
assert FOLDER is None or Path(FOLDER).resolve() in Path(trt.__file__).resolve().parents, f"found {trt.__file__} first"
add_to(trt)
stored_module: Any = importlib.import_module("llmbuild.plugins.tensorrt.stored_plugin")
# Without the library there is no registry; the registry itself is tested where there is one.
HAS_LIBRARY = FOLDER is None
