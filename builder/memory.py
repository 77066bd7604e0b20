"""How much memory a build needs at its peak, known before a weight is read; and how much it has taken so far.

    peak = what the process holds once the graph is optimised
         + what the hungriest weight needs while its pieces are read, rounded, packed and written
         + WORKSPACE

The first is measured, not guessed. The second is a few pieces for almost every weight; one that has to be made as a
whole (transposed by the model's code, or assembled by transformers) counts as a whole. Pages of the checkpoint that are
mapped while a piece is read count too, although the kernel could drop them. The C++ compiler, which the cpu target runs
before it writes weights, is another process (240 MB) and not counted.
"""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbuild.builder.ir import BlockPart, Program
from llmbuild.builder.weights import PIECE, WeightExpr
from llmbuild.errors import ConfigError
from llmbuild.units import human_size

WORKSPACE = 64_000_000  # lowering the graph, and what the allocator keeps
PACKED = 16  # bytes that a target may hold for each element of a piece while it packs it


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. program: Python, its packages and the traced graph. weight: what `name` adds. workspace: the rest."""

    program: int
    weight: int
    workspace: int
    name: str

    @property
    def total(self) -> int:
        return self.program + self.weight + self.workspace

    def to_dict(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "program": self.program,
            "weight": self.weight,
            "largest_weight": self.name,
            "workspace": self.workspace,
        }


def estimate(program: Program) -> MemoryEstimate:
    """Return what writing the engine of an optimised program needs; reads no weight."""
    needs = {name: needed(expr) for name, expr in program.weights.items()}
    name = max(needs, key=lambda each: (needs[each], each), default="")
    weight = 0
    if name:
        weight = needs[name]
        sources = sorted(program.weights[name].sources())
        if sources:
            name = sources[0] + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
    return MemoryEstimate(peak_rss(), weight, WORKSPACE, name)


def needed(expr: WeightExpr) -> int:
    """Return the bytes that writing one weight takes."""
    if isinstance(expr, BlockPart):  # the parts are loaded, packed and written together
        expr = expr.source
    return expr.held(PIECE) + PACKED * min(PIECE, math.prod(expr.shape))


def check(found: MemoryEstimate, allowed: int | None) -> None:
    """Refuse a build that does not fit.

    Raises:
        ConfigError: It needs more than `allowed` bytes.
    """
    if allowed is None or found.total <= allowed:
        return
    parts = [f"{human_size(found.program)} for Python, its packages and the traced graph"]
    if found.name:
        parts.append(f"{human_size(found.weight)} for the hungriest weight, {found.name}")
    parts.append(f"{human_size(found.workspace)} for packing and writing")
    raise ConfigError(
        f"converting needs about {human_size(found.total)} of memory, but only {human_size(allowed)} are allowed",
        where="--max-memory: " + ", ".join(parts),
        hint=f"allow {megabytes(found.total)}MB or more; weights are read and written in pieces already, so that "
        "another --quant changes little",
    )


def megabytes(size: int) -> int:
    """Return whole megabytes, rounded up."""
    return -(-size // 10**6)


def peak_rss() -> int:
    """Return the most bytes this process has ever held in memory, pages of mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would also count what ran in this process before exec
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
