"""What a build tells: `report.json` in the engine (deterministic) and `BuildReport` for whoever called `build`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmbuild.builder.ir import Program, Rewrite
    from llmbuild.engine.manifest import Manifest

REPORT_VERSION = 1


@dataclass(frozen=True)
class BuildReport:
    """The outcome of one build.

    Attributes:
        output: The engine directory.
        manifest: Its manifest.
        rewrites: What each pass did, in order.
        notes: What was chosen for the user, in words.
        seconds: Wall time by phase, for the console only: the engine holds no times.
        memory: What was estimated before weights were read, and the peak of the process, in bytes; for the console too.
        accuracy: The record in `report.json` against the unquantized model; None where nobody asked for it.
    """

    output: Path
    manifest: Manifest
    rewrites: list[Rewrite]
    notes: list[str]
    seconds: dict[str, float]
    memory: dict[str, Any]
    accuracy: dict[str, Any] | None = None

    @property
    def bytes(self) -> int:
        """Size of the engine's files, the manifest aside."""
        return sum(entry.size for entry in self.manifest.files)

    def to_dict(self) -> dict[str, Any]:
        """Return what `llmbuild convert --json` prints."""
        manifest = self.manifest
        return {
            "engine": str(self.output),
            "model": manifest.model.name,
            "architecture": manifest.model.architecture,
            "target": manifest.target.name,
            "dtype": manifest.precision.dtype,
            "quant": manifest.precision.recipe,
            "weights": manifest.precision.weights,
            "limits": manifest.limits.model_dump(),
            "bytes": self.bytes,
            "passes": passes_to_list(self.rewrites),
            "notes": self.notes,
            "seconds": {phase: round(value, 3) for phase, value in self.seconds.items()},
            "memory": self.memory,
            **({} if self.accuracy is None else {"accuracy": self.accuracy}),
        }


def passes_to_list(rewrites: list[Rewrite]) -> list[dict[str, Any]]:
    return [{"name": r.name, "count": r.count, "declined": r.declined} for r in rewrites]


def write_report(
    path: Path,
    program: Program,
    weight_bytes: dict[str, int],
    nodes_traced: int,
    accuracy: dict[str, Any] | None = None,
) -> None:
    """Write `report.json`: sorted keys, no times, no paths, so that the same model gives the same bytes.

    Args:
        weight_bytes: Bytes of weights by storage format, as the target wrote them.
        nodes_traced: Graph nodes before the passes.
        accuracy: The record of what was measured (`builder/accuracy/record.py`), if anything was.
    """
    data = {
        "report_version": REPORT_VERSION,
        "graph_nodes": {"traced": nodes_traced, "optimized": len(program.graph.nodes)},
        "passes": passes_to_list(program.rewrites),
        "weight_bytes": weight_bytes,
        **({} if accuracy is None else {"accuracy": accuracy}),
    }
    path.write_text(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
