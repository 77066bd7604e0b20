"""Open an engine directory: everything is checked before a weight is touched, and each message names the file."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmbuild.engine.checks import check_files, unlisted_files
from llmbuild.engine.manifest import CHECKSUM_NAME, FORMAT_VERSION, MANIFEST_NAME, Manifest
from llmbuild.engine.requirements import check_requirements
from llmbuild.engine.staging import interrupted_replacement
from llmbuild.errors import EngineError

REBUILD = "convert the model again with --force, or restore the file from a good copy"


@dataclass(frozen=True)
class Engine:
    """A checked engine directory. unlisted: files that lie in it without being part of it (harmless, but odd)."""

    path: Path
    manifest: Manifest
    unlisted: tuple[str, ...]

    def file(self, relative: str) -> Path:
        """Return the path of a file that the manifest lists.

        Raises:
            EngineError: The manifest does not list it.
        """
        if all(entry.path != relative for entry in self.manifest.files):
            raise EngineError(
                f"the engine does not hold {relative!r}", where=str(self.path / MANIFEST_NAME), hint=REBUILD
            )
        return self.path / relative

    def files_below(self, folder: str) -> list[Path]:
        """Return the paths of all listed files below a folder ("tokenizer"), sorted."""
        return [self.path / entry.path for entry in self.manifest.files if entry.path.startswith(folder + "/")]


def open_engine(path: Path | str, *, full_check: bool = False, requirements: bool = True) -> Engine:
    """Open an engine directory.

    Args:
        path: The directory that `llmbuild convert` wrote.
        full_check: Compare every SHA-256. Default: manifest checksum, presence, kind and size of files, and the
            SHA-256 of what is executed (plan/).
        requirements: Check the installed packages against the engine's version ranges.

    Raises:
        EngineError: Not an engine, another format version, damaged, incomplete, or built for other packages.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    problems = check_files(directory, manifest, full=full_check)
    if problems:
        raise EngineError(
            f"the engine is damaged: {problems[0]}"
            + (f" (and {len(problems) - 1} more; `llmbuild verify` lists them)" if len(problems) > 1 else ""),
            where=str(directory / problems[0].path),
            hint=REBUILD,
        )
    if requirements:
        check_requirements(manifest.target)
    return Engine(directory, manifest, unlisted_files(directory, manifest))


def read_manifest(directory: Path) -> Manifest:
    """Read and check `engine.json` alone.

    Raises:
        EngineError: No engine here, manifest changed, broken or of another format version.
    """
    path = directory / MANIFEST_NAME
    _check_is_engine(directory)
    raw = _read_plain(path)
    checksum = directory / CHECKSUM_NAME
    has_checksum = os.path.lexists(checksum)
    if has_checksum:
        _check_checksum(path, raw, _read_plain(checksum))
    data = _parse(path, raw)
    _check_version(path, data)
    if not has_checksum:
        raise EngineError(f"{CHECKSUM_NAME} is missing", where=str(checksum), hint=REBUILD)
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EngineError(
            f"{MANIFEST_NAME} does not follow format version {FORMAT_VERSION}: {field}: {first['msg']}",
            where=str(path),
            hint=REBUILD,
        ) from error


def _check_is_engine(directory: Path) -> None:
    if not directory.exists():
        aside = interrupted_replacement(directory)
        hint = "give the directory that `llmbuild convert MODEL -o ENGINE` wrote"
        if aside is not None:
            hint = f"an interrupted --force left the former engine beside it: mv {aside} {directory}"
        raise EngineError(f"no engine at {directory}", hint=hint)
    if not directory.is_dir():
        raise EngineError(f"{directory} is a file, not an engine directory", hint=_how_to_convert(directory))
    if not os.path.lexists(directory / MANIFEST_NAME):
        model = (directory / "config.json").exists() or any(directory.glob("*.gguf"))
        kind = "is a model, not an engine" if model else f"is not an engine: it holds no {MANIFEST_NAME}"
        raise EngineError(f"{directory} {kind}", hint=_how_to_convert(directory))


def _how_to_convert(model: Path) -> str:
    return f"llmbuild convert {model} -o ENGINE makes an engine from a model"


def _read_plain(path: Path) -> bytes:
    if path.is_symlink():
        raise EngineError(
            f"{path.name} is a symbolic link; an engine holds plain files only", where=str(path), hint=REBUILD
        )
    return path.read_bytes()


def _check_checksum(path: Path, raw: bytes, checksum: bytes) -> None:
    found = hashlib.sha256(raw).hexdigest()
    if checksum == checksum_line(found):
        return
    stated = checksum[:64].decode("ascii", errors="replace")
    if checksum != checksum_line(stated):
        raise EngineError(
            f"{CHECKSUM_NAME} is damaged: not one line of `sha256sum`", where=f"{path}.sha256", hint=REBUILD
        )
    raise EngineError(
        f"{MANIFEST_NAME} is not what {CHECKSUM_NAME} says: sha256 {found}, expected {stated}",
        where=str(path),
        hint="one of the two files was changed after the build; " + REBUILD,
    )


def checksum_line(sha256: str) -> bytes:
    """Return the content of `engine.json.sha256`, in the form that `sha256sum --check` reads."""
    return f"{sha256}  {MANIFEST_NAME}\n".encode()


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{MANIFEST_NAME} is not valid JSON: {error}", where=str(path), hint=REBUILD) from error
    if not isinstance(data, dict):
        raise EngineError(f"{MANIFEST_NAME} is not a JSON object", where=str(path), hint=REBUILD)
    return data


def _check_version(path: Path, data: dict[str, Any]) -> None:
    version = data.get("format_version")
    if version == FORMAT_VERSION and not isinstance(version, bool):
        return
    if not isinstance(version, int) or isinstance(version, bool):
        raise EngineError(
            f"{MANIFEST_NAME} states no format version (found {version!r})", where=str(path), hint=REBUILD
        )
    newer = version > FORMAT_VERSION
    raise EngineError(
        f"the engine has format version {version}; this llmbuild reads version {FORMAT_VERSION}",
        where=str(path),
        hint="upgrade llmbuild, or convert the model again with this one" if newer else "convert the model again",
    )
