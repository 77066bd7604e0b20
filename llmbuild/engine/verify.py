"""`llmbuild verify`: every problem of an engine directory at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmbuild.engine.checks import Problem, check_files, unlisted_files
from llmbuild.engine.manifest import MANIFEST_NAME
from llmbuild.engine.reader import read_manifest
from llmbuild.errors import EngineError


def verify(path: Path | str, on_chunk: Callable[[int], None] | None = None) -> list[Problem]:
    """Check format version, manifest, presence, kind, size and SHA-256 of every file, and that no other file is there.

    Args:
        path: The engine directory.
        on_chunk: Called with the bytes read, as hashing goes on.

    Returns:
        All problems; empty when the engine is exactly what was built. When the manifest itself is wrong, only that is
        reported: nothing else can be trusted then.

    Raises:
        EngineError: There is no engine at `path`.
    """
    directory = Path(path)
    try:
        manifest = read_manifest(directory)
    except EngineError as error:
        if error.where is None:
            raise
        return [Problem(Path(error.where).name or MANIFEST_NAME, error.what)]
    problems = check_files(directory, manifest, full=True, on_chunk=on_chunk)
    for relative in unlisted_files(directory, manifest):
        problems.append(Problem(relative, "is not part of the engine (the manifest does not list it)"))
    return problems
