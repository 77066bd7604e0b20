"""The descent and the search over made-up costs and losses: no model."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.autoquant.search import MOST_MEASUREMENTS, Choice, Descent, descent, search

UNIT = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=4)
UNITS = st.lists(UNIT, min_size=1, max_size=5)


def split(units: list[list[tuple[int, float]]]) -> tuple[list[list[int]], list[list[float]]]:
    return [[cost for cost, _ in unit] for unit in units], [[loss for _, loss in unit] for unit in units]


def total(of: list[list[float]] | list[list[int]], choice: Choice) -> float:
    return sum(each[option] for each, option in zip(of, choice, strict=True))


def test_the_best_bargain_comes_first() -> None:
    """Unit 0 saves 6 for 0.3, then 2 for 0.5; unit 1 saves 4 for 0.1; its option 1 lies above the hull."""
    way = descent([[10, 4, 2], [10, 9, 6]], [[0.0, 0.3, 0.8], [0.0, 0.09, 0.1]])
    assert way.start == (0, 0)
    assert [(step.unit, step.option, step.saved) for step in way.steps] == [(1, 2, 4), (0, 1, 6), (0, 2, 2)]
    assert [way.choice(count) for count in range(4)] == [(0, 0), (0, 2), (1, 2), (2, 2)]


def test_a_cheaper_option_that_loses_nothing_is_where_it_starts() -> None:
    assert descent([[10, 5]], [[0.0, 0.0]]) == Descent((1,), ())


@settings(deadline=None)
@given(UNITS)
def test_along_the_way_costs_fall_and_bargains_get_worse(units: list[list[tuple[int, float]]]) -> None:
    costs, losses = split(units)
    way = descent(costs, losses)
    assert total(losses, way.start) == pytest.approx(sum(map(min, losses)))
    slopes = [step.lost / step.saved for step in way.steps]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(slopes))
    for count, step in enumerate(way.steps):
        before, after = way.choice(count), way.choice(count + 1)
        assert total(costs, before) - total(costs, after) == step.saved > 0
        assert total(losses, after) - total(losses, before) == pytest.approx(step.lost)
    assert total(costs, way.choice(len(way.steps))) == sum(map(min, costs))


@settings(deadline=None)
@given(UNITS)
def test_no_choice_as_cheap_loses_less_in_sum(units: list[list[tuple[int, float]]]) -> None:
    """Choices along the hull are the best of their cost, were losses to add up."""
    costs, losses = split(units)
    way = descent(costs, losses)
    choices = list(itertools.product(*(range(len(unit)) for unit in units)))
    for count in range(len(way.steps) + 1):
        chosen = way.choice(count)
        as_cheap = [each for each in choices if total(costs, each) <= total(costs, chosen)]
        assert total(losses, chosen) <= min(total(losses, each) for each in as_cheap) + 1e-9


STEPS = 60
WAY = descent([[2, 1]] * STEPS, [[0.0, (1 + unit) * 1e-3] for unit in range(STEPS)])


@pytest.mark.parametrize(
    "kl",
    [
        lambda count: count * 1e-2,
        lambda count: (count / STEPS) ** 4,
        lambda count: 0.5 if count > 7 else 0.0,
        lambda count: 1e-6 * 2.0 ** (count / 2),
    ],
    ids=["line", "power", "jump", "exponential"],
)
@pytest.mark.parametrize("bound", [0.0, 1e-5, 0.02, 0.2, 2.0])
def test_the_search_finds_the_last_that_holds(kl: Callable[[int], float], bound: float) -> None:
    counts = {WAY.choice(count): count for count in range(STEPS + 1)}
    found = search(WAY, lambda choice: kl(counts[choice]), bound)
    holding = [count for count in range(STEPS + 1) if kl(count) <= bound]
    if not holding:
        assert found.choice is None and set(found.tried) == {0, STEPS}
        return
    assert found.choice == WAY.choice(holding[-1])
    assert len(found.tried) <= MOST_MEASUREMENTS
    assert found.tried == {count: kl(count) for count in found.tried}


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=STEPS + 1, max_size=STEPS + 1), st.floats(0, 1))
def test_what_is_returned_was_measured_to_hold(kl: list[float], bound: float) -> None:
    """Whatever the measurements are: also where they do not grow along the way."""
    counts = {WAY.choice(count): count for count in range(STEPS + 1)}
    found = search(WAY, lambda choice: kl[counts[choice]], bound)
    if found.choice is None:
        assert kl[0] > bound and kl[STEPS] > bound
    else:
        assert kl[counts[found.choice]] <= bound
        assert counts[found.choice] in found.tried


def test_nothing_to_step_back_to() -> None:
    assert search(descent([[1]], [[0.5]]), lambda _: 0.5, 0.1).choice is None
