"""How failures reach the terminal: exit codes, and messages without a traceback.

    0    done
    1    a defect of llmbuild: Python's traceback is printed, because a bug report needs it
    2    the user's mistake: message, where and what next on stderr; wrong options too (printed by typer)
    3    the model misses an accuracy threshold that was asked for; printed as the user's mistakes are
    130  interrupted from the keyboard

With `--json` stdout holds the result and nothing else; a user's mistake is one JSON object on stderr,
`{"error": {"kind", "what", "where", "next"}}`, and stdout stays empty. `LLMBUILD_DEBUG=1` or `llmbuild --debug ...`
shows the traceback of a user's mistake as well.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from llmbuild.errors import AccuracyError, LLMBuildError, UserError

EXIT_DEFECT = 1
EXIT_USER = 2
EXIT_ACCURACY = 3
DEBUG_VARIABLE = "LLMBUILD_DEBUG"


@contextmanager
def reporting(*, as_json: bool = False) -> Iterator[None]:
    """Run a command's body; turn errors raised on purpose, and files that cannot be accessed, into exit codes."""
    try:
        yield
    except LLMBuildError as error:
        _show(type(error).__name__, error.what, error.where, error.hint, as_json)
        raise typer.Exit(exit_code(error)) from None
    except OSError as error:
        if error.filename is None:  # a broken pipe, say, which typer handles; or a defect
            raise
        hint = "check the path and its permissions"
        _show("OSError", f"cannot access a file: {error.strerror}", os.fsdecode(error.filename), hint, as_json)
        raise typer.Exit(EXIT_USER) from None


def exit_code(error: LLMBuildError) -> int:
    if isinstance(error, AccuracyError):
        return EXIT_ACCURACY
    return EXIT_USER if isinstance(error, UserError) else EXIT_DEFECT


def _show(kind: str, what: str, where: str | None, hint: str | None, as_json: bool) -> None:
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        traceback.print_exc()
    if as_json:
        error: dict[str, Any] = {"kind": kind, "what": what, "where": where, "next": hint}
        print(json.dumps({"error": error}, ensure_ascii=False), file=sys.stderr)
    else:
        print(f"error: {LLMBuildError(what, where=where, hint=hint)}", file=sys.stderr)
