"""Observers: the magnitude that a quantized range ends at, from a histogram. The type is the dispatch key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmbuild.errors import ConfigError
from llmbuild.quantization.calibration.histogram import BINS, Histogram


@dataclass(frozen=True)
class AbsMax:
    """The largest magnitude seen: nothing is clipped."""


@dataclass(frozen=True)
class Percentile:
    """The smallest edge of a bin that at least `percent` of the values do not exceed."""

    percent: float

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise ConfigError(f"a percentile lies above 0 and is at most 100, not {self.percent}")


@dataclass(frozen=True)
class HistogramMse:
    """The range whose rounding to `levels` steps on either side of 0, clipping included, has the least square error."""

    levels: int = 127
    candidates: int = 128

    def __post_init__(self) -> None:
        if self.levels < 1 or self.candidates < 1:
            raise ConfigError(f"{self.levels} levels and {self.candidates} candidates: both must be at least 1")


Observer = AbsMax | Percentile | HistogramMse


def range_end(observer: Observer, histogram: Histogram, absmax: float) -> float:
    """Return the magnitude at which the range ends; 0 if all values were 0.

    Args:
        histogram: Of the values' magnitudes.
        absmax: The largest of them, which no result exceeds.
    """
    if histogram.exponent is None or absmax == 0:
        return 0.0
    if isinstance(observer, AbsMax):
        return absmax
    if isinstance(observer, Percentile):
        below = histogram.counts.cumsum(0)
        wanted = below[-1].double() * (observer.percent / 100)
        return min(float(histogram.edges[int((below.double() < wanted).sum())]), absmax)
    ends = absmax * torch.arange(1, observer.candidates + 1, dtype=torch.float64) / observer.candidates
    return float(ends[int(square_errors(histogram, ends, observer.levels).argmin())])


def square_errors(histogram: Histogram, ends: Tensor, levels: int) -> Tensor:
    """Return the sum of square errors for each end of the range, float64; values count as the middles of their bins."""
    used = histogram.counts > 0
    width = float(histogram.edges[0])
    values = (torch.arange(BINS, dtype=torch.float64)[used] + 0.5) * width
    counts = histogram.counts[used].double()
    step = (ends / levels)[:, None]
    rounded = (values / step).round().clamp(max=levels) * step
    return ((rounded - values).square() * counts).sum(1)
