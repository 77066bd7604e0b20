"""Which option each unit gets: the cheapest choice that is measured to keep a bound.

`descent` orders all steps to cheaper options by what they are believed to lose for what they save, as if losses added
up. They do not quite; so `search` measures choices along that order and returns the cheapest that holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST_MEASUREMENTS = 12

Choice = tuple[int, ...]  # the option of each unit


class Step(NamedTuple):
    """A unit goes over to another option. saved: what that makes cheaper. lost: KL that it adds, by itself."""

    unit: int
    option: int
    saved: int
    lost: float


class Descent(NamedTuple):
    """start: the option of each unit that loses least. steps: from there on, the best bargain first."""

    start: Choice
    steps: tuple[Step, ...]

    def choice(self, count: int) -> Choice:
        """Return the options after so many steps."""
        options = list(self.start)
        for step in self.steps[:count]:
            options[step.unit] = step.option
        return tuple(options)


class Found(NamedTuple):
    """The cheapest choice that holds; None if the start does not. tried: KL by steps, as measured."""

    choice: Choice | None
    tried: dict[int, float]


def descent(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]]) -> Descent:
    """Return the way down along the lower convex hull of each unit's (saved, lost) points, all units interleaved.

    Args:
        costs, losses: Of each option of each unit.
    """
    start, steps = [], []
    for unit, (cost, loss) in enumerate(zip(costs, losses, strict=True)):
        at = min(range(len(cost)), key=lambda option: (loss[option], cost[option], option))
        start.append(at)
        while True:
            cheaper = [option for option in range(len(cost)) if cost[option] < cost[at]]
            if not cheaper:
                break
            slope = {option: (loss[option] - loss[at]) / (cost[at] - cost[option]) for option in cheaper}
            to = min(cheaper, key=lambda option: (slope[option], cost[option], option))
            steps.append((slope[to], unit, Step(unit, to, cost[at] - cost[to], loss[to] - loss[at])))
            at = to
    # Of one unit the slopes grow, so that a stable sort keeps its steps in their order.
    steps.sort(key=lambda each: each[:2])
    return Descent(tuple(start), tuple(step for _, _, step in steps))


def search(way: Descent, measure: Callable[[Choice], float], max_kl: float) -> Found:
    """Walk down as far as the measured KL stays within the bound.

    The cheapest choice is measured first; then the one that the sum of losses, scaled by what was measured so far, puts
    at the bound; and so on between the best that holds and the first that does not.
    """
    tried: dict[int, float] = {}

    def holds(count: int) -> bool:
        tried[count] = measure(way.choice(count))
        return tried[count] <= max_kl

    end = len(way.steps)
    if holds(end):
        return Found(way.choice(end), tried)
    if end == 0 or not holds(0):
        return Found(None, tried)
    sums = [0.0]
    for step in way.steps:
        sums.append(sums[-1] + step.lost)
    low, high = 0, end
    while high - low > 1 and len(tried) < MOST_MEASUREMENTS:
        middle = between(sums, tried, low, high, max_kl)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Found(way.choice(low), tried)


def between(sums: Sequence[float], tried: dict[int, float], low: int, high: int, max_kl: float) -> int:
    """Return where to measure next, between `low` and `high`, of which the first holds and the second does not.

    Between two measured points the KL is taken to grow as the sums do. Every second time the middle is taken, so that a
    sum that is far off costs no more than that.
    """
    middle = (low + high) // 2
    if len(tried) % 2 or sums[high] <= sums[low]:
        return middle
    share = (max_kl - tried[low]) / (tried[high] - tried[low])
    wanted = sums[low] + share * (sums[high] - sums[low])
    guess = max(count for count in range(low, high) if sums[count] <= wanted or count == low)
    return min(max(guess, low + 1), high - 1)
