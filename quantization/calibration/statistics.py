"""What is known of one value that linears read: gathered window by window, and merged."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmbuild.errors import ModelError
from llmbuild.quantization.calibration.histogram import Histogram
from llmbuild.quantization.calibration.sample import Sample


@dataclass
class InputStatistics:
    """Of a value x [rows, K], all rows of all windows.

    Attributes:
        rows: How many rows were seen.
        absmax: float32 [K], the largest |x| of each channel.
        total: float64 [K], the sum of |x| of each channel.
        gram: float32 [K, K], the sum of xᵀx; None where it was not asked for.
        sample: Some of the rows.
        histogram: Of |x|, all channels together.
    """

    rows: int
    absmax: Tensor
    total: Tensor
    gram: Tensor | None
    sample: Sample
    histogram: Histogram = field(default_factory=Histogram)

    @classmethod
    def empty(cls, columns: int, *, gram: bool) -> InputStatistics:
        matrix = torch.zeros(columns, columns) if gram else None
        total = torch.zeros(columns, dtype=torch.float64)
        return cls(0, torch.zeros(columns), total, matrix, Sample.empty(columns))

    @property
    def mean(self) -> Tensor:
        """Mean |x| of each channel, float64 [K]."""
        return self.total / max(1, self.rows)

    def add(self, x: Tensor, *, name: str, window: int) -> None:
        """Count the rows of x [..., K], any float dtype.

        Raises:
            ModelError: x holds NaN or infinity, or squares that float32 cannot; the message says which linear reads it.
        """
        values = x.detach().reshape(-1, x.shape[-1]).float()
        magnitudes = values.abs()
        refuse_non_finite(magnitudes, name, window)
        self.rows += len(values)
        self.absmax = torch.maximum(self.absmax, magnitudes.amax(0))
        self.total += magnitudes.double().sum(0)
        self.histogram.add(magnitudes)
        self.sample.add(values)
        if self.gram is not None:
            self.gram.addmm_(values.T, values)
            if not bool(torch.isfinite(self.gram.diagonal()).all()):
                raise ModelError(
                    f"the input of {name!r} is too large to be squared in float32",
                    where=f"calibration, window {window}",
                    hint="a recipe that needs no calibration, such as int4-wo, may do; or exclude this layer",
                )

    def merge(self, other: InputStatistics) -> None:
        """Add what `other` has seen. Both have a Gram matrix, or neither."""
        if self.absmax.shape != other.absmax.shape or (self.gram is None) != (other.gram is None):
            raise ValueError("statistics of different inputs cannot be merged")
        self.rows += other.rows
        self.absmax = torch.maximum(self.absmax, other.absmax)
        self.total = self.total + other.total
        self.histogram.merge(other.histogram)
        self.sample.merge(other.sample)
        if self.gram is not None and other.gram is not None:
            self.gram = self.gram + other.gram


def refuse_non_finite(magnitudes: Tensor, name: str, window: int) -> None:
    if bool(torch.isfinite(magnitudes).all()):
        return
    row, channel = (int(index) for index in (~torch.isfinite(magnitudes)).nonzero()[0])
    value = float(magnitudes[row, channel])
    raise ModelError(
        f"the input of {name!r} holds {'NaN' if value != value else 'infinity'} during calibration",
        where=f"window {window}, token {row}, channel {channel}",
        hint="check the checkpoint, and the computation dtype: float16 overflows where bfloat16 does not",
    )
