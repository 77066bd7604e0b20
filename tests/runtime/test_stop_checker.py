from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.runtime.stop_checker import StopChecker

PIECES = st.lists(st.text(st.sampled_from("ab-"), max_size=4), max_size=12)
STOPS = st.lists(st.text(st.sampled_from("ab-"), min_size=1, max_size=4), max_size=3).map(tuple)


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


@settings(max_examples=500, deadline=None)
@given(PIECES, STOPS, st.booleans())
def test_equals_a_search_of_the_whole_text_after_each_piece(pieces, stops, include) -> None:
    checker, whole, shown = StopChecker(stops, include_in_output=include), "", ""
    for piece in pieces:
        whole += piece
        stopped = checker.feed(piece)
        match = first_match(whole, stops)
        assert stopped == (match[1] if match else None)
        assert checker.text[: checker.visible].startswith(shown), "text was shown and taken back"
        shown = checker.text[: checker.visible]
        if match:
            assert shown == whole[: match[0] + (len(match[1]) if include else 0)]
            return
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        # What is held could still become a stop string, and nothing that could is shown.
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(whole[i:]) for stop in stops for i in range(len(shown)))
    checker.end()
    assert checker.text[: checker.visible] == whole


def test_across_pieces_and_what_comes_before_is_shown() -> None:
    checker = StopChecker(("END",))
    assert checker.feed("some text E") is None and checker.visible == len("some text ")
    assert checker.feed("N") is None and checker.visible == len("some text ")
    assert checker.feed("D and more") == "END"
    assert checker.text == "some text "


def test_a_beginning_that_turns_out_to_be_none_is_shown() -> None:
    checker = StopChecker(("END",))
    checker.feed("EN")
    assert checker.visible == 0
    assert checker.feed("T") is None
    assert checker.text[: checker.visible] == "ENT"


def test_the_first_match_wins_then_the_longest() -> None:
    assert StopChecker(("b", "ab")).feed("xab") == "ab"
    assert StopChecker(("a", "ab")).feed("xab") == "ab"


def test_text_that_was_not_searched_cannot_stop_later() -> None:
    checker = StopChecker(("ab",))
    assert checker.feed("ab a", search=False) is None
    assert checker.visible == 4
    assert checker.feed("b") is None  # this match would begin in the part that may not stop
    assert checker.feed("ab") == "ab"
    assert checker.text == "ab ab"
