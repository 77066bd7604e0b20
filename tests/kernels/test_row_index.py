"""Index expressions: whatever is simplified, the numbers stay what they are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.targets.cuda.index import Index, Var, index_of

ROW = index_of(Var("row"))
HEAD, CHANNEL = index_of(Var("h", 32)), index_of(Var("c", 128))
VARIABLES = (Var("a", 7), Var("b", 12), Var("d", 16), Var("e"))
DIVISORS = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


def indices() -> st.SearchStrategy[Index]:
    """Expressions that are not negative, as views make them."""
    leaves = st.builds(
        lambda var, factor, const: index_of(var) * factor + const,
        st.sampled_from(VARIABLES),
        st.sampled_from([1, 2, 3, 4, 12]),
        st.integers(0, 5),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda x, y: x + y, inner, inner),
            st.builds(lambda x, by: x.divide(by)[0], inner, DIVISORS),
            st.builds(lambda x, by: x.divide(by)[1], inner, DIVISORS),
            st.builds(lambda x: x if x.high is None else x * -1 + x.high, inner),  # reversed
        ),
        max_leaves=5,
    )


def values(index: Index) -> np.ndarray:
    """The text, run for 50 values of the variables."""
    rng = np.random.default_rng(0)
    numbers = {var.name: rng.integers(0, var.extent or 40, 50) for var in VARIABLES}
    return np.broadcast_to(np.asarray(eval(index.text, {}, numbers)), 50)


@settings(max_examples=200, deadline=None)
@given(indices(), DIVISORS)
def test_a_division_gives_quotient_and_remainder_within_their_bounds(index: Index, by: int) -> None:
    quotient, rest = index.divide(by)
    expected = values(index)
    np.testing.assert_array_equal(values(quotient), expected // by)
    np.testing.assert_array_equal(values(rest), expected % by)
    for each in (index, quotient, rest):
        found = values(each)
        assert each.low is not None and each.low <= found.min()
        assert each.high is None or found.max() <= each.high


@settings(max_examples=100, deadline=None)
@given(indices(), DIVISORS)
def test_what_was_taken_apart_comes_together_as_the_same_numbers(index: Index, by: int) -> None:
    quotient, rest = index.divide(by)
    np.testing.assert_array_equal(values(quotient * by + rest), values(index))


def test_rows_heads_and_channels_come_apart_without_a_division() -> None:
    flat = ROW * 4096 + HEAD * 128 + CHANNEL
    assert flat.divide(128) == (ROW * 32 + HEAD, CHANNEL)
    assert flat.divide(4096) == (ROW, HEAD * 128 + CHANNEL)
    assert flat.text == "row * 4096 + h * 128 + c"


def test_a_reshape_and_its_inverse_cancel() -> None:
    wide = index_of(Var("c", 4096))
    head, channel = wide.divide(128)
    assert head.text == "(c // 128)"
    assert head * 128 + channel == wide
    assert ROW * 4096 + head * 128 + channel == ROW * 4096 + wide


def test_a_reversed_index_divides_by_what_it_is_not_by_parts_that_are_negative() -> None:
    quotient, rest = (CHANNEL * -1 + 127).divide(64)
    assert quotient.high == 1
    assert rest.text == "((-c + 127) % 64)"


def test_equal_expressions_are_equal_however_they_were_made() -> None:
    assert HEAD + CHANNEL * 2 == CHANNEL + HEAD + CHANNEL
    assert (HEAD + CHANNEL * -1 + CHANNEL) == HEAD
    assert (HEAD * 0).constant == 0


def test_axes_and_masks_are_those_of_all_variables() -> None:
    lane = Var("c", 96, frozenset({1}), ("c < 96",))
    quotient, rest = index_of(lane).divide(10)
    assert (quotient + rest + ROW).axes == {1}
    assert (quotient * 3 + rest).masks == ("c < 96",)


def test_a_variable_with_one_value_is_no_variable() -> None:
    assert index_of(Var("h", 1)).constant == 0
