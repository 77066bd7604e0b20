"""Text to calibrate and to measure on: the user's file, or the documentation strings of the installed Python.

No text comes with llmbuild. Without a file, documentation strings of the standard library are read at run time with
`ast`: no module is imported, so that none can do anything. Each top-level module belongs to one purpose alone, by the
hash of its name: what was calibrated on is never measured on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmbuild.errors import ConfigError

Purpose = Literal["calibration", "evaluation"]

# Programs and tests that lie among the modules, and two versions of what another module documents.
NOT_DOCUMENTATION = frozenset({"test", "idlelib", "lib2to3", "turtledemo", "antigravity", "this"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Text:
    """content: the text. source: where it comes from, without a directory. sha256: of the content as UTF-8."""

    content: str
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode("utf-8")).hexdigest()


def load_text(path: Path | None, purpose: Purpose, *, characters: int, option: str) -> Text:
    """Return the text of a file, or documentation strings when there is none.

    Args:
        path: A UTF-8 text file, or JSONL (`.jsonl`) of objects with a string `text`. None: documentation strings.
        purpose: Which documentation strings; a file is taken for either.
        characters: How many characters of documentation strings suffice. A file is read whole.
        option: What the user gave the path with, such as "--accuracy-text".

    Raises:
        ConfigError: The file cannot be read as text, or holds none; the message names the line.
    """
    return documentation_strings(purpose, characters) if path is None else read_text(path, option)


def read_text(path: Path, option: str) -> Text:
    """Return the text of a UTF-8 file; of JSONL all lines' texts, with an empty line between. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory; text is read from a file",
            where=option,
            hint="reading Arrow and Parquet takes packages that llmbuild does not need otherwise: save a data set with "
            'dataset.to_json("text.jsonl") and give that file',
        )
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}", where=option, hint="give a text file or JSONL") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}",
            where=option,
            hint="save the text as UTF-8; JSONL must have the suffix .jsonl",
        ) from None
    if path.suffix == ".jsonl":
        content = "\n\n".join(_jsonl_texts(content, path, option))
    if not content.strip():
        raise ConfigError(f"{path} holds no text", where=option, hint="give a file with a few thousand words")
    return Text(content, path.name)


def _jsonl_texts(content: str, path: Path, option: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"line {number} of {path} is not JSON: {error}", where=option, hint="one JSON object a line"
            ) from None
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ConfigError(
                f"line {number} of {path} has no text",
                where=option,
                hint='each line must be an object with a string "text"',
            )
        yield text


def documentation_strings(purpose: Purpose, characters: int) -> Text:
    """Return documentation strings of the standard library: whole modules, by name, until `characters` are reached.

    The same Python gives the same text. Fewer characters come back when there are no more.

    Raises:
        ConfigError: This Python has no sources of its library (it is a frozen or zipped one), or one does not parse.
    """
    parts: list[str] = []
    length = 0
    for name in documented_modules(purpose):
        for path in module_files(name):
            strings = docstrings(path)
            parts += strings
            length += sum(len(text) + 2 for text in strings)
        if length >= characters:
            break
    if not parts:
        raise ConfigError(
            "this Python has no sources of its standard library, whose documentation would be the text",
            where=str(library()),
            hint="give a text file",
        )
    return Text("\n\n".join(parts), f"documentation strings of Python {platform.python_version()} ({purpose})")


def documented_modules(purpose: Purpose) -> list[str]:
    """Return the sorted top-level modules whose documentation serves `purpose`; each module serves one."""
    # Private modules repeat what public ones say (`_pydecimal`, `decimal`).
    public = (name for name in sys.stdlib_module_names if not name.startswith("_") and name not in NOT_DOCUMENTATION)
    return sorted(name for name in public if purpose_of(name) == purpose)


def purpose_of(module: str) -> Purpose:
    """Return what a module's documentation serves: by its name alone, whichever other modules there are."""
    return "evaluation" if hashlib.sha256(module.encode()).digest()[0] % 2 else "calibration"


def library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def module_files(name: str) -> list[Path]:
    """Return the source files of a top-level module, sorted; none if it is written in C."""
    folder, file = library() / name, library() / f"{name}.py"
    if not folder.is_dir():
        return [file] if file.is_file() else []
    found = (path for path in folder.rglob("*.py") if not TEST_FOLDERS.intersection(path.relative_to(folder).parts))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def docstrings(path: Path) -> list[str]:
    """Return the documentation strings of a source file, in the order in which they stand there.

    Raises:
        ConfigError: It is not Python.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"a source of this Python does not parse: {error}", where=str(path), hint="give a text file"
        ) from None
    found = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                found.append(text)
        waiting += reversed(list(ast.iter_child_nodes(node)))
    return found
