"""What can be wrong with the files of an engine, each problem with the file's name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmbuild.engine.hashing import sha256_file, walk
from llmbuild.engine.manifest import CHECKSUM_NAME, MANIFEST_NAME, FileEntry, Manifest


@dataclass(frozen=True)
class Problem:
    """One wrong file. path: relative to the engine, forward slashes. what: expected and found, without the path."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def check_files(
    directory: Path, manifest: Manifest, *, full: bool, on_chunk: Callable[[int], None] | None = None
) -> list[Problem]:
    """Compare the files that the manifest lists with those on disk.

    Args:
        directory: The engine.
        manifest: Its manifest, already checked against its own checksum.
        full: Compare every SHA-256 (reads everything). Otherwise presence, kind and size, and the SHA-256 of what is
            executed, the files below plan/: they are small, and a wrong bit there is not just a wrong number.
        on_chunk: Called with the bytes read, as hashing goes on.

    Returns:
        One problem a wrong file, in the manifest's order; empty when all are right.
    """
    problems = []
    for entry in manifest.files:
        what = _file_problem(directory, entry)
        if what is None and (full or entry.path.startswith("plan/")):
            found = sha256_file(directory / entry.path, on_chunk)
            if found != entry.sha256:
                what = f"content changed: sha256 {found}, expected {entry.sha256}"
        if what is not None:
            problems.append(Problem(entry.path, what))
    return problems


def _file_problem(directory: Path, entry: FileEntry) -> str | None:
    path = directory
    for part in entry.path.split("/"):
        path = path / part
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return f"missing (expected {entry.size} bytes)"
        if stat.S_ISLNK(status.st_mode):
            return f"is reached through a symbolic link to {os.readlink(path)!r}; an engine holds plain files only"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size != entry.size:
        verb = "truncated" if status.st_size < entry.size else "too long"
        return f"{verb}: {status.st_size} bytes, expected {entry.size}"
    return None


def unlisted_files(directory: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return the relative paths of what lies in the engine and is not part of it, sorted."""
    known = {MANIFEST_NAME, CHECKSUM_NAME, *(entry.path for entry in manifest.files)}
    return tuple(relative for relative, _ in walk(directory) if relative not in known)
