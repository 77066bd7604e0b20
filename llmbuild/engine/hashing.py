"""Which files a directory holds, and their SHA-256. Standard library only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

CHUNK = 4 << 20


def sha256_file(path: Path, on_chunk: Callable[[int], None] | None = None) -> str:
    """Return the lower-case hex SHA-256 of a file; `on_chunk(bytes)` is called as reading goes on."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_chunk is not None:
                on_chunk(count)
    return digest.hexdigest()


def walk(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield (relative path with forward slashes, path) of everything below `directory` that is not a real folder.

    Sorted by relative path. Symbolic links are yielded as they are and never followed.
    """
    found = []
    for parent, folders, files in os.walk(directory, followlinks=False):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in (*files, *links):
            path = Path(parent, name)
            found.append((path.relative_to(directory).as_posix(), path))
    yield from sorted(found)


def path_problem(path: str) -> str | None:
    """Return why `path` cannot name a file of an engine, or None if it can: relative, normal, inside."""
    if "\\" in path or "\0" in path:
        return f"path {path!r} holds a backslash or a zero byte"
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        return f"path {path!r} leaves the engine directory"
    if "" in parts or "." in parts:
        return f"path {path!r} is not in its normal form"
    return None
