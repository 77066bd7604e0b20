"""What starting costs: seconds are printed, what is imported is asserted."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "transformers", "onnxruntime", "onnx", "numpy", "pydantic", "rich", "tokenizers", "jinja2")

HELP = """
import sys
from llmbuild.cli.main import entry_point
sys.argv = ["llmbuild", *{words!r}]
try:
    entry_point()
except SystemExit as exit:
    assert exit.code == 0, exit.code
"""


def loaded_by(code: str) -> set[str]:
    """Run code in a new interpreter; return which of HEAVY it imported, and print the time."""
    start = time.perf_counter()
    listing = f"{code}\nimport sys\nprint('LOADED', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    print(f"{time.perf_counter() - start:.3f} s")
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_import_is_light():
    assert loaded_by("import llmbuild") == set()


def test_help_is_light():
    assert loaded_by(HELP.format(words=["--help"])) == set()
    assert loaded_by(HELP.format(words=["--version"])) == set()


@pytest.mark.parametrize("command", ["convert", "run", "chat", "inspect", "verify", "bench latency"])
def test_help_of_a_command_is_light(command):
    # Some versions of typer check option types with pydantic.
    assert loaded_by(HELP.format(words=[*command.split(), "--help"])) <= {"pydantic"}


def test_runtime_needs_no_builder():
    loaded = "import llmbuild.runtime.llm, llmbuild.engine.reader"
    assert not loaded_by(loaded) & {"torch", "transformers", "onnx", "rich"}


def test_the_check_itself_sees_imports():
    assert loaded_by("import numpy") == {"numpy"}
