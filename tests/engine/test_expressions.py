"""Sizes as text: their values, and that nothing but sizes is legal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbuild.engine.expressions import MAX_LENGTH, evaluate, parse
from llmbuild.errors import EngineError

VALUES = {"T": 33, "B": 4, "L": 1, "S": 1000}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("T", 33),
        ("cdiv(T, 16)", 3),
        ("cdiv(T, 16) * max(B, 2) - S % 7", 6),
        ("min(T, B, 9) + -L", 3),
        ("(T + 15) // 16", 3),
        (" T ", 33),
    ],
)
def test_values(text: str, value: int) -> None:
    assert evaluate(text, VALUES) == value


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_cdiv_rounds_up(a: int, b: int) -> None:
    value = evaluate(f"cdiv({a}, {b})", {})
    assert (value - 1) * b < a <= value * b


NO_SIZES = """
    T ** 2; T / 2; 1.5; True; X; T.real; T[0]; T if B else L; T < B; abs(T); [T]; ~T; 'T'; min(1, *T); cdiv(a=1, b=2);
    (lambda: 1)(); __import__('os'); T << 2
"""


@pytest.mark.parametrize("text", [text.strip() for text in NO_SIZES.split(";")])
def test_nothing_else_is_legal(text: str) -> None:
    with pytest.raises(EngineError, match="which no size may"):
        parse(text)


def test_messages() -> None:
    with pytest.raises(EngineError, match="'T T' is no expression"):
        parse("T T")
    with pytest.raises(EngineError, match="calls cdiv with 3 values"):
        parse("cdiv(T, 2, 3)")
    with pytest.raises(EngineError, match="a size of 401 characters; 400 are the most"):
        parse("1" * (MAX_LENGTH + 1))
    with pytest.raises(EngineError, match=r"'T \+ B' needs a value for B"):
        evaluate("T + B", {"T": 1})
    with pytest.raises(EngineError, match="'T // B' divides by zero\n  where: B = 0, T = 1"):
        evaluate("T // B", {"T": 1, "B": 0})


def test_names() -> None:
    assert parse("cdiv(T, 16) * B + 1").names == {"T", "B"}
