"""What a search found: for the config's `search` section, for `--json`, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbuild.builder.accuracy.measures import Figures
from llmbuild.builder.accuracy.record import figures_to_dict, rounded
from llmbuild.builder.line_plot import line_plot

AUTOQUANT = "autoquant"
MEGABYTE = 1e6


@dataclass(frozen=True)
class Measured:
    """One choice as measured. name: "autoquant", or the recipe that all units follow. stored, read: bytes."""

    name: str
    choice: tuple[int, ...]
    stored: int
    read: int
    figures: Figures

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.stored, "bytes_read": self.read, **figures_to_dict(self.figures)}


@dataclass(frozen=True)
class UnitResult:
    """recipe: what was chosen. stored, read: bytes under it. alone: KL of each candidate in this unit alone."""

    name: str
    recipe: str
    stored: int
    read: int
    alone: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        alone = {recipe: rounded(loss) for recipe, loss in self.alone.items()}
        return {
            "name": self.name,
            "recipe": self.recipe,
            "bytes": self.stored,
            "bytes_read": self.read,
            "kl_alone": alone,
        }


@dataclass(frozen=True)
class Autoquant:
    """The outcome of a search.

    Attributes:
        config, plot: The files written.
        search: The `search` section of the config.
        chosen: The choice, as measured.
        measured: All choices that were measured, the uniform ones included, by bytes.
        units: In the order of the graph.
        notes: What was chosen for the user, in words.
    """

    config: Path
    plot: Path
    search: dict[str, Any]
    chosen: Measured
    measured: Sequence[Measured]
    units: Sequence[UnitResult]
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "config": str(self.config),
            "plot": str(self.plot),
            "search": self.search,
            "chosen": self.chosen.to_dict(),
            "measured": [each.to_dict() for each in self.measured],
            "units": [unit.to_dict() for unit in self.units],
        }


def pareto_plot(measured: Sequence[Measured], max_kl: float, objective: str) -> str:
    """Return an SVG of KL against bytes: choices of the search, uniform ones, and the bound.

    The scale of the KL is logarithmic; what is as good as unquantized has no place on it.
    """

    def points(of: list[Measured]) -> list[tuple[float, float]]:
        bytes_of = [each.read if objective == "decode" else each.stored for each in of]
        return [
            (size / MEGABYTE, each.figures.kl_mean)
            for size, each in zip(bytes_of, of, strict=True)
            if each.figures.kl_mean > 0
        ]

    searched = points([each for each in measured if each.name == AUTOQUANT])
    series = {"autoquant": searched} if searched else {}
    for each in measured:
        if each.name != AUTOQUANT and (point := points([each])):
            series[each.name] = point
    ends = [point[0] for each in series.values() for point in each] or [0.0, 1.0]
    if max_kl > 0:
        series["bound"] = [(min(ends), max_kl), (max(ends), max_kl)]
    if not series:
        series["unquantized"] = [(0.0, 1.0), (1.0, 1.0)]
    label = "MB read in a decode step" if objective == "decode" else "MB of weights"
    return line_plot(
        "Choices of precision, as measured",
        label,
        "mean KL, nats",
        series,
        log_y=True,
        dashed=frozenset({"bound", "unquantized"}),
    )
