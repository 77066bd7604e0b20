"""Numbers and lists written for people."""

from __future__ import annotations


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
