"""Some rows of a value as they are, chosen by their contents: the same ones in whatever order rows come.

Each row has a priority, a hash of its numbers; those of the lowest priorities are kept, equal rows once. So merged
samples equal the sample of all rows together.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 256
HASHED = 256  # channels: rows that agree in so many are taken for the same


class Sample:
    """At most ROWS rows, by rising priority.

    Attributes:
        rows: float32 [n, K].
        priorities: int64 [n], all different.
    """

    def __init__(self, rows: Tensor, priorities: Tensor) -> None:
        self.rows, self.priorities = rows, priorities

    @classmethod
    def empty(cls, columns: int) -> Sample:
        return cls(torch.zeros(0, columns), torch.zeros(0, dtype=torch.int64))

    def add(self, rows: Tensor) -> None:
        """Consider float32 rows [n, K]."""
        self._take(rows, priorities_of(rows))

    def merge(self, other: Sample) -> None:
        """Consider what `other` has kept."""
        self._take(other.rows, other.priorities)

    def _take(self, rows: Tensor, priorities: Tensor) -> None:
        if len(self.priorities) == ROWS:  # most rows of a long text stop here, before they are copied
            better = priorities < self.priorities[-1]
            rows, priorities = rows[better], priorities[better]
        together = torch.cat((self.priorities, priorities))
        order = torch.argsort(together, stable=True)
        ranked = together[order]
        first = torch.ones(len(ranked), dtype=torch.bool)
        first[1:] = ranked[1:] != ranked[:-1]
        order = order[first][:ROWS]
        self.rows = torch.cat((self.rows, rows))[order]
        self.priorities = together[order]


def priorities_of(rows: Tensor) -> Tensor:
    """Return the priority of each float32 row [n, K], int64 [n]: a sum of products modulo 2**64, then mixed.

    The multipliers are Weyl's sequence of the golden ratio, the mixing is the end of splitmix64.
    """
    bits = rows[:, :HASHED].contiguous().view(torch.int32).long()
    multipliers = torch.arange(1, bits.shape[1] + 1) * -0x61C8864680B583EB | 1
    mixed = (bits * multipliers).sum(1)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))
