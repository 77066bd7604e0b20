"""The folder an engine is built in, beside its final place, and the rename that publishes it.

    parent/
      NAME                     the engine, whole at every moment
      .NAME.building-PID       being written; locked (flock) by the process that writes it
      .NAME.replaced-PID       the former engine, for an instant, where the filesystem cannot exchange two folders

A process that is killed loses its locks: what it left behind is told from live work without trusting process ids,
which are the same in every container.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

AT_FDCWD = -100
RENAME_EXCHANGE = 2
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)


def create_staging(out: Path) -> tuple[Path, int]:
    """Make and lock an empty `.NAME.building-PID` beside `out`; return it and the descriptor that holds the lock."""
    number = 0
    while True:
        suffix = f"-{number}" if number else ""
        path = out.with_name(f".{out.name}.building-{os.getpid()}{suffix}")
        number += 1
        try:
            path.mkdir()
        except FileExistsError:
            continue
        lock = try_lock(path)
        # Between mkdir and flock another convert may have taken the folder for a leftover and removed it.
        if lock is not None and path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            return path, lock


def try_lock(path: Path) -> int | None:
    """Lock a folder; return the descriptor to close, or None when another process holds it (or locks do not work)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def clean_leftovers(out: Path) -> None:
    """Remove what killed runs left beside `out`; first put back an engine whose replacement was interrupted."""
    aside = interrupted_replacement(out)
    if aside is not None:
        lock = try_lock(aside)
        if lock is not None:
            os.rename(aside, out)
            os.close(lock)
    for path in (*_siblings(out, "building"), *_siblings(out, "replaced")):
        lock = try_lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def interrupted_replacement(out: Path) -> Path | None:
    """Return the former engine that a killed `--force` left beside `out` while `out` itself is absent, or None."""
    if os.path.lexists(out):
        return None
    return next(_siblings(out, "replaced"), None)


def _siblings(out: Path, kind: str) -> Iterator[Path]:
    prefix = f".{out.name}.{kind}-"
    if out.parent.is_dir():
        for path in sorted(out.parent.iterdir()):
            if path.name.startswith(prefix) and path.name[len(prefix) :].replace("-", "").isdigit():
                yield path


def publish(staging: Path, out: Path, *, replace: bool) -> None:
    """Give `staging` the name `out`.

    An empty directory at `out` is replaced by the rename itself. With `replace`, a non-empty one is exchanged with
    `staging` in one system call, so that `out` is the old or the new engine at every moment; where the filesystem
    cannot do that, it is renamed aside first.

    Raises:
        OSError: `out` is not empty and `replace` is false (ENOTEMPTY), or the filesystem refuses.
    """
    if not (replace and out.is_dir() and any(out.iterdir())):
        os.rename(staging, out)
        fsync_directory(out.parent)
        return
    if exchange(staging, out):
        fsync_directory(out.parent)
        shutil.rmtree(staging, ignore_errors=True)  # the old engine now; a rest is a leftover for the next convert
        return
    aside = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    lock = try_lock(out)
    os.rename(out, aside)
    try:
        os.rename(staging, out)
    except OSError:
        os.rename(aside, out)
        raise
    fsync_directory(out.parent)
    shutil.rmtree(aside, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def exchange(first: Path, second: Path) -> bool:
    """Swap the names of two folders atomically. Returns False where the system or the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def fsync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Make every file and folder below `directory` durable, innermost first."""
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(parent))
