"""Compiles native/ into the shared library that an engine carries, with whatever C++17 compiler is at hand.

The sources use no C++ standard library, so the result needs libc alone, and the compiler may be any of:

1. the command in LLMBUILD_CXX ("none" to do without),
2. c++, g++ or clang++ on the PATH,
3. the PyPI package `ziglang`, a compiler in a wheel.

Without one an engine uses onnxruntime's own operators: same weights, slower.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from llmbuild.errors import ConfigError

MACHINE = "x86_64"
FEATURES = ("avx2", "f16c", "fma")  # as Linux names them in /proc/cpuinfo; x86-64-v3 has them all
FLAGS = (
    *("-x", "c++", "-std=c++17", "-O3", "-march=x86-64-v3", "-ffp-contract=fast"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fvisibility=hidden", "-fPIC", "-shared"),
    *("-Wno-psabi", "-s", "-Wl,--build-id=none"),
)
VARIABLE = "LLMBUILD_CXX"


@dataclass(frozen=True)
class Compiler:
    """A command that compiles C++, and the first line of its --version."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler | None:
    """Return the first compiler that answers, or None when there is none or this machine has no native operators.

    Raises:
        ConfigError: LLMBUILD_CXX names a command that does not run.
    """
    if sys.platform != "linux" or platform.machine() != MACHINE:
        return None
    named = os.environ.get(VARIABLE)
    if named == "none":
        return None
    if named:
        compiler = probe(shlex.split(named))
        if compiler is None:
            raise ConfigError(f"{VARIABLE}={named!r} does not run", hint='name a C++17 compiler, or "none"')
        return compiler
    candidates = [[path] for path in map(shutil.which, ("c++", "g++", "clang++")) if path]
    if importlib.util.find_spec("ziglang") is not None:
        candidates.append([sys.executable, "-m", "ziglang", "c++"])
    return next((compiler for compiler in map(probe, candidates) if compiler is not None), None)


def probe(command: Sequence[str]) -> Compiler | None:
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return Compiler(tuple(command), answer.stdout.splitlines()[0].strip() if answer.stdout else "unknown")


def sources() -> dict[str, bytes]:
    """Return the files of native/, by name."""
    folder = resources.files("llmbuild.builder.targets.cpu") / "native"
    return {item.name: item.read_bytes() for item in sorted(folder.iterdir(), key=lambda i: i.name)}


def compile_library(compiler: Compiler, out: Path) -> None:
    """Compile native/ to the shared library `out`. Same sources, flags and compiler give the same bytes.

    A compiled library is kept in the user's cache folder, so that only the first build waits for the compiler.

    Raises:
        ConfigError: the compiler fails; its messages are in the error.
    """
    files = sources()
    cached = cache_path(compiler, files)
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            built = Path(folder) / "native.so"
            run(compiler, Path(folder), built)
            built.replace(cached)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(cached, out)


def run(compiler: Compiler, folder: Path, out: Path) -> None:
    command = [*compiler.command, *FLAGS, "-o", out.name, "library.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        first_messages = "\n".join(result.stderr.strip().splitlines()[:12])
        raise ConfigError(
            f"compiling the native operators failed: {first_messages}",
            where=" ".join(command),
            hint=f"set {VARIABLE} to another compiler, or to none to build without native operators",
        )


def cache_path(compiler: Compiler, files: dict[str, bytes]) -> Path:
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode())
    for name, data in files.items():
        digest.update(name.encode() + b"\0" + data)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmbuild" / f"native-{digest.hexdigest()[:32]}.so"
