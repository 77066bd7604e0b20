"""What a self-test found, step by step."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from llmbuild.errors import LLMBuildError

State = Literal["passed", "failed", "not run"]
T = TypeVar("T")


class NotHere(Exception):
    """This machine cannot take the step; the text says why."""


@dataclass(frozen=True)
class Step:
    """name: what was tried. seconds: it took. detail: what was found, why it failed, or why it was not run."""

    name: str
    state: State
    seconds: float
    detail: str


@dataclass
class TargetRecord:
    """The steps of one target, in order."""

    target: str
    steps: list[Step] = field(default_factory=list)

    def take(self, name: str, work: Callable[[], tuple[str, T]], *, needs: tuple[str, ...] = ()) -> T | None:
        """Take a step, whatever it raises, and record it.

        Args:
            work: Returns what to say, and its result.
            needs: Steps that must have passed before.

        Returns:
            The result; None when the step failed or was not run.
        """
        missing = [step for step in self.steps if step.name in needs and step.state != "passed"]
        if missing:
            self.steps.append(Step(name, "not run", 0.0, f"{missing[0].name}: {missing[0].state}"))
            return None
        start = time.perf_counter()
        result: T | None = None
        state: State = "passed"
        try:
            detail, result = work()
        except NotHere as why:
            state, detail = "not run", str(why)
        except LLMBuildError as error:
            state, detail = "failed", str(error)
        except Exception:  # whatever a vendor's library or a defect raises is what the report is for
            state, detail = "failed", traceback.format_exc().strip()
        self.steps.append(Step(name, state, round(time.perf_counter() - start, 3), detail))
        return result

    def count(self, state: State) -> int:
        return sum(step.state == state for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
