"""SmoothQuant: channels with large inputs are made smaller where they come in, and larger in the weight.

A row of x that is rounded to 8 bits as a whole has the steps that its largest channel needs; in models a few channels
are large for all tokens. Divided by s (`quantization.scaled`), with

    s = max|x| ** α / max|w| ** (1 - α)        of each channel

rows get finer steps and weights coarser ones. α is searched for each input: of 0 .. 1, and of no s at all, that is
taken which loses least of the outputs, with both sides rounded,

    ‖X·Wᵀ - Q(X·diag(s)⁻¹)·Q(W·diag(s))ᵀ‖²     for the rows X that calibration kept and some rows of the weights

Xiao, Lin, Seznec, Wu, Demouth, Han, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models" (ICML 2023), equations 3 and 4. There α is one number for a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbuild.errors import ModelError
from llmbuild.plugins.scaled_ops import INVERSE, TINY, quantize_rows
from llmbuild.quantization.blocks import BlockTensor
from llmbuild.quantization.compensated import Statistics
from llmbuild.quantization.expressions import Source
from llmbuild.quantization.primitives import quantize_blocks
from llmbuild.quantization.recipes import PerTensor, SmoothQuant
from llmbuild.quantization.scaled import ScaleSearch, SomeRows

LEAST = 1e-5  # of the largest: channels without inputs or weights count as having so much
MOST = 1e4  # times larger or smaller than the mean: 16-bit floats hold what is scaled


def candidates(x: Tensor, w: Tensor, steps: int) -> list[Tensor]:
    """Return ones, then s for α = 0, 1/steps, .. 1, float32 [K] each, from max|x| and max|w| of each channel.

    Their geometric mean is 1: rounding sees no difference, but numbers stay about as large.
    """
    logs = [part.double().clamp(min=LEAST * float(part.max()) or 1.0).log() for part in (x, w)]
    found = [torch.ones(len(x))]
    for step in range(steps + 1):
        alpha = step / steps
        scales = alpha * logs[0] - (1 - alpha) * logs[1]
        found.append((scales - scales.mean()).exp().clamp(1 / MOST, MOST).float())
    return found


def rounded_rows(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return rows as products of 8-bit numbers see them, float32 [n, K]."""
    q, scales = quantize_rows(x, scale, torch.int8)
    return q.float() * scales


def static_scale(absmax: Tensor) -> Tensor:
    """Return the one scale, float32 [1], with which inputs of these largest magnitudes [K] are not clipped."""
    found = absmax.max().float().reshape(1) * INVERSE[torch.int8]
    return torch.where(found < TINY, torch.ones_like(found), found)


class SmoothSearch(ScaleSearch):
    def __init__(self, sources: tuple[Source, ...], scheme: SmoothQuant, statistics: Statistics, key: str) -> None:
        super().__init__(sources, statistics, key)
        self.scheme = scheme

    def search(self, x: Tensor, weights: SomeRows) -> Tensor:
        absmax = self.statistics.absmax(self.key)
        exact = x @ weights.rows.T
        tried = candidates(absmax, weights.absmax, self.scheme.steps)
        losses = [float((self.outputs(x, weights.rows, s, absmax) - exact).double().square().sum()) for s in tried]
        return tried[losses.index(min(losses))]

    def outputs(self, x: Tensor, weight: Tensor, scales: Tensor, absmax: Tensor) -> Tensor:
        """Return what rounded rows and weights give, float32 [n, N]."""
        static = static_scale(absmax / scales) if isinstance(self.scheme.activations, PerTensor) else None
        blocks = quantize_blocks(weight * scales, self.scheme.rounding, name="rows that are tried")
        return rounded_rows(x / scales, static) @ blocks.dequantize().T


@dataclass(frozen=True)
class StaticScale:
    """The scale, float32 [1], of all rows of an input: the largest magnitude seen is 127.

    search: What divides the input's channels, None where nothing does.
    """

    statistics: Statistics
    key: str
    search: ScaleSearch | None

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        absmax = self.statistics.absmax(self.key)
        if not bool(torch.isfinite(absmax).all()):  # a statistics file of somebody else's making
            raise ModelError(
                f"the statistics of the input of {self.key!r} are not finite", hint="calibrate this model again"
            )
        return static_scale(absmax if self.search is None else absmax / self.search.scales)

    def load_blocks(self) -> BlockTensor:
        raise TypeError("a scale is a plain tensor")

    def sources(self) -> frozenset[str]:
        return frozenset()

    def pieces(self, elements: int) -> Iterator[Tensor]:
        yield self.load()

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        return 0 if self.search is None else self.search.held()
