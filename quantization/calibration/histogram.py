"""How often magnitudes occur, in bins that grow by powers of two: independent of the order of the data, bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

BINS = 2048


@dataclass
class Histogram:
    """Counts of |x| in BINS equal bins over 0 .. 2**exponent; exponent is None as long as all values were 0.

    Growing to twice the range adds neighbouring bins, which puts every value where it would have been put at once:
    floor(floor(x·B / 2**e) / 2) = floor(x·B / 2**(e + 1)). So merged histograms equal that of all data together.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    exponent: int | None = None

    def add(self, values: Tensor) -> None:
        """Count finite values of any shape."""
        magnitudes = values.detach().abs().double().flatten()
        top = float(magnitudes.max()) if magnitudes.numel() else 0.0
        self._reach(math.frexp(top)[1] if top else None)
        if self.exponent is None:
            self.counts[0] += magnitudes.numel()
            return
        places = (magnitudes * 2.0 ** (BINS.bit_length() - 1 - self.exponent)).long()
        self.counts += torch.bincount(places, minlength=BINS)

    def merge(self, other: Histogram) -> None:
        """Count what `other` has counted."""
        mine = Histogram(other.counts.clone(), other.exponent)
        self._reach(other.exponent)
        mine._reach(self.exponent)
        self.counts += mine.counts

    @property
    def edges(self) -> Tensor:
        """Upper edges of the bins, float64 [BINS]."""
        width = 0.0 if self.exponent is None else 2.0**self.exponent / BINS
        return torch.arange(1, BINS + 1, dtype=torch.float64) * width

    def _reach(self, exponent: int | None) -> None:
        """Grow the range to 2**exponent, if it is smaller."""
        if exponent is None or (self.exponent is not None and exponent <= self.exponent):
            return
        if self.exponent is not None:
            together = 1 << min(exponent - self.exponent, BINS.bit_length() - 1)
            sums = self.counts.reshape(-1, together).sum(1)
            self.counts = torch.cat((sums, sums.new_zeros(BINS - len(sums))))
        self.exponent = exponent
