"""Places in the arena: buffers that live at different times share memory.

op       0    1    2    3
a        ████████
b             ████████          b cannot lie where a does; c can
c                  ████████
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmbuild.engine.launch_plan import ALIGNMENT, Buffer, Limits, Place, most_bytes


@dataclass(frozen=True)
class Need:
    """A buffer without a place yet. size: bytes, an expression."""

    name: str
    dtype: str
    size: str


@dataclass(frozen=True)
class Layout:
    """buffers: with their places, in order of the ops that write them. needed: most bytes that live at one time."""

    buffers: tuple[Buffer, ...]
    arena_bytes: int
    needed: int


def lay_out(needs: Sequence[Need], places: Sequence[Sequence[Place]], limits: Limits) -> Layout:
    """Give each buffer the lowest place that is free while it lives; large ones choose first.

    Args:
        places: What each op touches, and after the ops, what reads their result.
    """
    lives = lifetimes(places)
    bytes_of = {need.name: aligned(most_bytes(need.size, limits)) for need in needs}
    placed: list[tuple[int, str]] = []
    offsets: dict[str, int] = {}
    for need in sorted(needs, key=lambda each: (-bytes_of[each.name], lives[each.name], each.name)):
        first, end = lives[need.name]
        offset = 0
        for start, other in placed:  # by rising place
            if lives[other][0] <= end and first <= lives[other][1]:
                if start - offset >= bytes_of[need.name]:
                    break
                offset = max(offset, start + bytes_of[other])
        offsets[need.name] = offset
        placed = sorted([*placed, (offset, need.name)])
    buffers = tuple(
        Buffer(
            name=need.name,
            dtype=need.dtype,
            size=need.size,
            offset=offsets[need.name],
            first=lives[need.name][0],
            last=lives[need.name][1],
        )
        for need in sorted(needs, key=lambda each: (lives[each.name], each.name))
    )
    arena = max((offsets[name] + size for name, size in bytes_of.items()), default=0)
    return Layout(buffers, arena, most_at_once(lives, bytes_of, len(places)))


def lifetimes(places: Sequence[Sequence[Place]]) -> dict[str, tuple[int, int]]:
    """Return the first and the last op that touches each buffer."""
    found: dict[str, tuple[int, int]] = {}
    for number, touched in enumerate(places):
        for place in touched:
            if place.kind == "buffer":
                found[place.name] = (found.get(place.name, (number, number))[0], number)
    return found


def most_at_once(lives: Mapping[str, tuple[int, int]], bytes_of: Mapping[str, int], count: int) -> int:
    """Return the bytes that live at the worst op: no arena can be smaller."""
    change = [0] * (count + 2)
    for name, (first, last) in lives.items():
        change[first] += bytes_of[name]
        change[last + 1] -= bytes_of[name]
    most = now = 0
    for each in change:
        now += each
        most = max(most, now)
    return most


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
