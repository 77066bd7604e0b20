"""Errors that users see: what is wrong, where, and what to do next.

The command line turns a `UserError` into exit code 2 and an `AccuracyError` into 3, without a traceback; anything else
is a defect of llmbuild (exit code 1).
"""

from __future__ import annotations


class LLMBuildError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: One sentence that states the fact, with the offending value in it.
        where: File, tensor, option or graph node concerned; None when `what` already says it.
        hint: What the user can do next; None when there is nothing to do.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        lines = [what]
        if where is not None:
            lines.append(f"  where: {where}")
        if hint is not None:
            lines.append(f"  next:  {hint}")
        super().__init__("\n".join(lines))


class UserError(LLMBuildError):
    """The input or the request is at fault, not llmbuild. Exit code 2."""


class ModelError(UserError):
    """The model directory or GGUF file cannot be read as it is (missing, truncated, contradictory)."""


class UnsupportedError(UserError):
    """The model or option is understood, but this version cannot represent it exactly."""


class ConfigError(UserError):
    """A build option is invalid or contradicts another."""


class EngineError(UserError):
    """The engine directory is damaged, incomplete, of another version, or does not fit this machine."""


class DeviceError(EngineError):
    """There is no GPU here that could run the engine: no driver, no such card, or not the package that reaches it."""


class RequestError(UserError, ValueError):
    """A generation request is invalid or beyond the engine's limits."""


class AccuracyError(LLMBuildError):
    """A model misses an accuracy threshold that was asked for, or its logits are no distribution. Exit code 3."""


class EngineStoppedError(LLMBuildError):
    """The serving loop failed or was closed while requests were waiting; the cause is chained."""


def nearest(name: str, known: list[str]) -> str:
    """Return a hint that lists `known` and names the closest match to `name`, if one is close."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    listed = "known: " + ", ".join(sorted(known))
    return f"did you mean {close[0]!r}? {listed}" if close else listed
