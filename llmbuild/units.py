"""Numbers and lists written for people."""

from __future__ import annotations


def human_size(size: int) -> str:
    """Return a size in decimal units with one digit ("269.1 MB"); small ones in bytes."""
    if size < 100_000:
        return f"{size:,} bytes"
    if size < 10**9:
        return f"{size / 1e6:,.1f} MB"
    return f"{size / 1e9:,.1f} GB"


def counted(reasons: list[str]) -> str:
    """Return reasons one a line, in the order of their first appearance, equal ones counted ("3 x reason")."""
    counts = {reason: reasons.count(reason) for reason in reasons}
    return "\n".join(f"{count} x {reason}" if count > 1 else reason for reason, count in counts.items())
