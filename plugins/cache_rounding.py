"""What an 8-bit KV cache makes of keys and values, in torch: the numbers that are stored, and what they stand for.

fp8     e4m3, as its bits (uint8): x / scale to nearest, ties to even, what is beyond 448 becomes 448. One scale for
        all keys of a layer and one for its values.
int8    x / scale to nearest, ties to even. A scale for each token and head: its largest magnitude / 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_LARGEST = 448.0
INT8_LARGEST = 127.0


def round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., D], scale float32 [1] -> uint8 [..., D]. NaN stays NaN."""
    inside = (x.float() / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return inside.to(torch.float8_e4m3fn).view(torch.uint8)


def round_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> int8 [..., D], float32 [..., 1].

    A row of zeros has the scale 0. One that holds a NaN or an infinity has the scale infinity and zeros, which stand
    for NaN: it is not hidden from who looks at the result.
    """
    wide = x.float()
    scale = wide.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).amax(-1, keepdim=True) / INT8_LARGEST
    usable = (scale > 0) & (scale < float("inf"))
    numbers = torch.where(usable, wide / torch.where(usable, scale, 1.0), 0.0).round()
    return numbers.clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8), scale


def widened(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return in float32 what uint8 or int8 [..., D] stand for. scale: float32 [1], or [..., 1] for each row."""
    wide = numbers.view(torch.float8_e4m3fn) if numbers.dtype == torch.uint8 else numbers
    return wide.float() * scale
