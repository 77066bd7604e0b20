from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import llmbuild.runtime

found = ["llmbuild"]
for module in pkgutil.walk_packages(llmbuild.runtime.__path__, "llmbuild.runtime."):
    found.append(module.name)
for name in found:
    importlib.import_module(name)
heavy = ("torch", "transformers", "llmbuild.builder", "onnx", "gguf")
print(len(found))
print([name for name in sys.modules if name in heavy or name.startswith(tuple(h + "." for h in heavy))])
"""


def test_the_runtime_imports_neither_torch_nor_transformers_nor_the_builder() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    count, heavy = done.stdout.splitlines()
    assert int(count) > 20
    assert heavy == "[]"
