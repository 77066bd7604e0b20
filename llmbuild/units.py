"""Numbers and lists written for people, and sizes that people write."""

from __future__ import annotations

import re

_LETTERS = ("", "K", "M", "G", "T")


def parse_size(text: str) -> int:
    """Return the bytes that "4GiB", "4G" (the same), "4GB" (4,000,000,000), "1.5 g" or "300000000" stand for.

    Raises:
        ValueError: It is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(IB|B)?|B)?\s*", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    number, letter, unit = match.groups()
    size = round(float(number) * (1000 if unit == "B" else 1024) ** _LETTERS.index(letter or ""))
    if size < 1:
        raise ValueError(f"{text!r} is not a size")
    return size


def human_size(size: int) -> str:
    """Return a size in decimal units with one digit ("269.1 MB"), below 1,000 in bytes."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} bytes"


def counted(reasons: list[str]) -> str:
    """Return reasons one a line, in the order of their first appearance, equal ones counted ("3 x reason")."""
    counts = {reason: reasons.count(reason) for reason in reasons}
    return "\n".join(f"{count} x {reason}" if count > 1 else reason for reason, count in counts.items())
