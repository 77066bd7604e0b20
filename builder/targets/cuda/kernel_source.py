"""Generated Triton source as functions that Triton accepts: it reads the text of a function back from its file."""

from __future__ import annotations

import hashlib
import linecache
from typing import Any


def functions(source: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the `@triton.jit` functions of a generated module. No file is written: the text goes to `linecache`."""
    file = f"<llmbuild {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": "llmbuild_row_programs"}
    exec(compile(source, file, "exec"), module)
    return {name: module[name] for name in names}
