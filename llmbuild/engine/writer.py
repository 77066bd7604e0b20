"""Write an engine directory so that its final path holds a whole engine or what was there before, never a part."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from llmbuild.engine.checks import check_files, unlisted_files
from llmbuild.engine.hashing import path_problem, sha256_file, walk
from llmbuild.engine.manifest import (
    CHECKSUM_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    BuildSection,
    FileEntry,
    KVCacheSection,
    LimitsSection,
    Manifest,
    ModelSection,
    PrecisionSection,
    TargetSection,
)
from llmbuild.engine.reader import checksum_line, read_manifest
from llmbuild.engine.staging import clean_leftovers, create_staging, fsync_tree, publish
from llmbuild.errors import ConfigError, EngineError
from llmbuild.units import human_size

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output path that this build may not take. Cheap: call it before any work.

    Raises:
        ConfigError: `out` is a file, a directory that is no engine, or an engine and `force` is false.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise ConfigError(f"the output path {out} is a file", where="--output", hint="give the path of a directory")
    names = sorted(path.name for path in out.iterdir())
    if not names:
        return
    if MANIFEST_NAME not in names:
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ConfigError(
            f"the output directory {out} exists and is not an engine (it holds {listed})",
            where="--output",
            hint="choose another path; --force replaces engines only, never other data",
        )
    if not force:
        raise ConfigError(
            f"the output directory {out} exists", where="--output", hint="--force replaces the engine in it"
        )


class EngineWriter:
    """Context manager for one engine: fill `directory`, then `commit`. Leaving it without commit removes everything.

    Args:
        out: The engine's final path. Missing parents are made (and removed again when nothing is committed).
        force: Replace an existing engine. Anything else that is not an empty directory is never replaced.

    Raises:
        ConfigError: `out` may not be taken, see `check_output`.
        EngineError: The operating system refused to write (disk full, no permission); says where and how much.
    """

    directory: Path

    def __init__(self, out: Path, *, force: bool = False) -> None:
        self.out = Path(os.path.realpath(out))
        self.force = force
        self._expected: int | None = None
        self._committed = False
        self._made_parents: list[Path] = []

    def __enter__(self) -> EngineWriter:
        try:
            self._make_parents()
            clean_leftovers(self.out)
            check_output(self.out, force=self.force)
            self.directory, self._lock = create_staging(self.out)
        except OSError as error:
            self._remove_parents()
            raise self._explain(error) from error
        except ConfigError:
            self._remove_parents()
            raise
        return self

    def expect(self, size: int) -> None:
        """Say how many bytes will be written at least.

        Raises:
            EngineError: The filesystem has less room than that.
        """
        self._expected = size
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise EngineError(
                f"not enough disk space: the engine needs about {human_size(size)}, {human_size(free)} are free",
                where=str(self.out.parent),
                hint="free some space or choose an --output on another disk",
            )

    def commit(
        self,
        *,
        model: ModelSection,
        target: TargetSection,
        precision: PrecisionSection,
        limits: LimitsSection,
        kv_cache: KVCacheSection,
        build: BuildSection,
        progress: Callable[[int, int], None] | None = None,
    ) -> Manifest:
        """Hash what lies in `directory`, write the manifest last, make all durable, check, and rename into place.

        Args:
            progress: Called with (bytes hashed, bytes in all).
        """
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            model=model,
            target=target,
            precision=precision,
            limits=limits,
            kv_cache=kv_cache,
            build=build,
            files=_entries(self.directory, progress),
        )
        text = manifest.to_json().encode()
        (self.directory / CHECKSUM_NAME).write_bytes(checksum_line(hashlib.sha256(text).hexdigest()))
        (self.directory / MANIFEST_NAME).write_bytes(text)
        fsync_tree(self.directory)
        self._check(manifest)
        check_output(self.out, force=self.force)
        publish(self.directory, self.out, replace=self.force)
        self._committed = True
        return manifest

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        explained = None
        if isinstance(error, OSError) and self._concerns_output(error):
            explained = self._explain(error)
        if not self._committed:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._remove_parents()
        os.close(self._lock)
        if explained is not None:
            raise explained from error

    def _check(self, manifest: Manifest) -> None:
        # The hashes were taken from these very files a moment ago: reading all again would prove nothing new.
        if read_manifest(self.directory) != manifest:
            raise AssertionError(f"{MANIFEST_NAME} does not read back as it was written")
        problems = check_files(self.directory, manifest, full=False)
        unlisted = unlisted_files(self.directory, manifest)
        if problems or unlisted:
            raise AssertionError(
                f"files changed during the commit: {[str(problem) for problem in problems]} {unlisted}"
            )

    def _concerns_output(self, error: OSError) -> bool:
        if error.errno in DISK_FULL:
            return True
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        return any(name.startswith(str(self.directory)) or name == str(self.out) for name in names)

    def _explain(self, error: OSError) -> EngineError:
        if error.errno not in DISK_FULL:
            return EngineError(
                f"cannot write the engine: {error.strerror or error}",
                where=str(error.filename or self.out),
                hint="choose an --output that this user can write to",
            )
        written = _size_of(self.directory) if hasattr(self, "directory") else 0
        needs = f"the engine needs about {human_size(self._expected)}, " if self._expected is not None else ""
        return EngineError(
            f"the disk is full: {needs}{human_size(written)} had been written ({error.strerror})",
            where=str(self.out.parent),
            hint="nothing was left behind; free some space or choose an --output on another disk",
        )

    def _make_parents(self) -> None:
        missing = [parent for parent in self.out.parents if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._made_parents.append(parent)

    def _remove_parents(self) -> None:
        for parent in reversed(self._made_parents):
            try:
                parent.rmdir()
            except OSError:  # another process has put something there meanwhile
                return


def _entries(directory: Path, progress: Callable[[int, int], None] | None) -> list[FileEntry]:
    found = list(walk(directory))
    for relative, path in found:
        if path.is_symlink() or path_problem(relative) is not None:
            raise AssertionError(f"a target wrote {relative!r}, which no engine may hold")
    total = sum(path.stat().st_size for _, path in found)
    done = 0

    def on_chunk(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return [
        FileEntry(path=relative, size=path.stat().st_size, sha256=sha256_file(path, on_chunk))
        for relative, path in found
    ]


def _size_of(directory: Path) -> int:
    return sum(path.stat().st_size for _, path in walk(directory) if path.exists())
