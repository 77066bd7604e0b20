"""Hashes of the files a model was read from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_CHUNK = 8 << 20


def hash_files(files: Iterable[Path]) -> tuple[tuple[str, int, str], ...]:
    """Return (name, bytes, sha256) of every file, sorted by name, reading them in pieces."""
    return tuple(sorted((file.name, file.stat().st_size, _sha256(file)) for file in files))


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
