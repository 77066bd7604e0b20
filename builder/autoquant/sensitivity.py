"""How much each recipe of each unit moves the logits, alone: everything else is computed unquantized.

All (unit, option) pairs walk through the graph together, segment by segment as in calibration. A pair forks off the
unquantized values where the segment of its unit begins, and carries its own from there to the logits:

    segment      0            1            2          ..   logits
    unquantized  ●────────────●────────────●───────── .. ──●
    unit a       └─ forked ───●────────────●───────── .. ──● KL
    unit b                    └─ forked ───●───────── .. ──● KL

so that a segment's weights are read once for all pairs. What pairs carry grows with their number: they are taken in
batches that hold at most `CARRIED_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from llmbuild.builder.accuracy.measures import Comparison
from llmbuild.builder.autoquant.units import Option, Unit
from llmbuild.builder.calibrate import SegmentWeights, one_window, placeholders, run, segments
from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import last_uses
from llmbuild.plugins.attention_reference import paged_state

CARRIED_BYTES = 2 << 30
CARRIED_VALUES = 4  # of the residual's width: the residual, an attention's output, and what some blocks keep beside

Windows = Sequence[Sequence[int]]
Values = list[dict[fx.Node, Any]]  # by window


@dataclass
class Fork:
    """One option of one unit on its way. place: the segment where it begins."""

    unit: int
    option: int
    place: int
    chosen: Option
    values: Values = field(default_factory=list)
    comparison: Comparison = field(default_factory=Comparison)


def sensitivities(
    program: Program,
    units: Sequence[Unit],
    options: Sequence[Sequence[Option]],
    windows: Windows,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[list[float]]:
    """Return the mean KL, in nats, from the unquantized logits of each option of each unit; 0 where it is exact.

    Args:
        program: Before its weights are quantized. Not changed.
        options: Of each unit.
        windows: Token ids, each the beginning of a text of its own.
        progress: Told after each segment.

    Raises:
        AccuracyError: Logits are no distribution.
    """
    (logits,) = [node.args[0] for node in program.graph.nodes if node.op == "output"]
    assert isinstance(logits, fx.Node)
    parts = segments(program.graph, {logits})
    place_of = {node: place for place, nodes in enumerate(parts) for node in nodes}
    forks = [
        Fork(u, o, min(place_of[node] for node in unit.nodes), option)
        for u, unit in enumerate(units)
        for o, option in enumerate(options[u])
        if not option.exact
    ]
    found = [[0.0] * len(each) for each in options]
    tokens = sum(map(len, windows))
    at_once = max(1, CARRIED_BYTES // (4 * CARRIED_VALUES * program.info.hidden_size * tokens))
    batches = [forks[begin : begin + at_once] for begin in range(0, len(forks), at_once)]
    walk = Walk(program, parts, logits, windows)
    for number, batch in enumerate(batches):
        for place in range(len(parts)):
            walk.advance(place, batch)
            if progress is not None:
                progress(number * len(parts) + place + 1, len(batches) * len(parts), f"layer {place}")
        for fork in batch:
            found[fork.unit][fork.option] = fork.comparison.figures().kl_mean
    return found


class Walk:
    """Takes the unquantized values and those of forks through one segment after another."""

    def __init__(self, program: Program, parts: list[list[fx.Node]], logits: fx.Node, windows: Windows) -> None:
        self.program, self.parts, self.logits, self.windows = program, parts, logits, windows
        self.dead_after = last_uses(program.graph)
        self.exact: Values = []

    def advance(self, place: int, forks: Sequence[Fork]) -> None:
        """Run segment `place`; after the last one compare what forks made of it. Place 0 begins anew."""
        if place == 0:
            self.exact = [placeholders(self.program, window) for window in self.windows]
        for fork in forks:
            if fork.place == place:
                fork.values = [dict(values) for values in self.exact]
        weights = SegmentWeights(self.program)
        self._run(place, self.exact, weights, None)
        for fork in forks:
            if fork.place <= place:
                own = SegmentWeights(self.program, fork.chosen.weights, weights)
                self._run(place, fork.values, own, fork)

    def _run(self, place: int, values: Values, weights: SegmentWeights, fork: Fork | None) -> None:
        calls = {} if fork is None else fork.chosen.calls
        last = place == len(self.parts) - 1
        for number, window in enumerate(self.windows):
            with paged_state(one_window(len(window))), torch.inference_mode():
                for _ in run(self.parts[place], values[number], weights, self.dead_after, calls):
                    pass
                if last and fork is not None:
                    targets = np.asarray(window[1:])
                    exact, given = (each[number][self.logits].float() for each in (self.exact, values))
                    fork.comparison.add(exact, given, targets)
                    values[number] = {}
