"""What TensorRT says goes to a logger: its last errors are the reason why something failed."""

from __future__ import annotations

from typing import Any


def make_log(module: Any) -> Any:
    """Return a logger of these bindings that keeps the last errors."""

    class Log(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                self.errors = [*self.errors[-3:], message]

        def reason(self) -> str:
            return "; ".join(self.errors) or "it gives no reason"

        def forget(self) -> None:
            self.errors = []

    return Log()
