"""AWQ: channels that large inputs meet are rounded on a finer grid.

Rounding W·diag(s) instead of W (`quantization.scaled`) moves error from channels with a large s to others. Of
s = mean|x| ** α, the α in 0 .. 1 is taken that loses least,

    ‖X·(W - Q(W·diag(s))·diag(s)⁻¹)ᵀ‖²        summed over all linears that read x

and α = 0, which is rounding to nearest, is among those tried. X are the rows that calibration kept, and of W some rows
are tried: rows are rounded each for itself, so that their losses are a sample of all.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han, "AWQ: Activation-aware Weight Quantization for On-Device LLM
Compression and Acceleration" (MLSys 2024), equations 4 and 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmbuild.quantization.compensated import Statistics
from llmbuild.quantization.expressions import Source
from llmbuild.quantization.primitives import quantize_blocks
from llmbuild.quantization.recipes import Awq
from llmbuild.quantization.scaled import ScaleSearch, SomeRows

LEAST = 1e-4  # of mean |x|: channels without inputs are not scaled to nothing


def candidates(mean: Tensor, steps: int) -> list[Tensor]:
    """Return the scales for α = 0, 1/steps, .. 1, float32 [K] each, from mean |x| [K]. The first are exactly 1.

    They are divided by the geometric mean of the largest and the smallest, so that weights stay about as large.
    """
    found = [torch.ones(len(mean))]
    for step in range(1, steps + 1):
        scales = mean.double().clamp(min=LEAST) ** (step / steps)
        found.append((scales / (scales.max() * scales.min()).sqrt()).float())
    return found


def lost(weight: Tensor, scales: Tensor, scheme: Awq, x: Tensor) -> float:
    """Return the square error of the outputs for rows x [n, K] when rows of a weight are rounded after scaling."""
    blocks = quantize_blocks(weight * scales, scheme.rounding, name="rows that are tried")
    error = weight - blocks.dequantize() / scales
    return float((x @ error.T).double().square().sum())


class AwqSearch(ScaleSearch):
    def __init__(self, sources: tuple[Source, ...], scheme: Awq, statistics: Statistics, key: str) -> None:
        super().__init__(sources, statistics, key)
        self.scheme = scheme

    def search(self, x: Tensor, weights: SomeRows) -> Tensor:
        tried = candidates(self.statistics.mean(self.key), self.scheme.steps)
        losses = [lost(weights.rows, scales, self.scheme, x) for scales in tried]
        return tried[losses.index(min(losses))]
