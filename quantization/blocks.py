"""Block-quantized weights, independent of where they came from and of how a target packs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockFormat:
    """How a [N, K] weight is held: W[n, k] = scale[n, k // block_size] * (q[n, k] - zero) + offset[n, k // block_size].

    Args:
        bits: Width of q; values are 0 .. 2**bits - 1.
        block_size: Columns that share one scale.
        zero: Value of q that stands for 0 in symmetric formats.
        has_offset: Whether an `offset` (the minimum of GGUF's `_1` and `_K` types, or an asymmetric zero point) exists.
        source: Name of the format this was read from ("Q4_1"), or of the recipe that made it.
    """

    bits: int
    block_size: int
    zero: int
    has_offset: bool
    source: str


@dataclass(frozen=True)
class BlockTensor:
    """A weight in `BlockFormat`: q uint8 [N, K] (unpacked), scale and offset float32 [N, ceil(K / block_size)]."""

    format: BlockFormat
    q: Tensor
    scale: Tensor
    offset: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.q.shape[0], self.q.shape[1])

    def dequantize(self) -> Tensor:
        """Return the float32 [N, K] weight."""
        from llmbuild.plugins.ops import dequantize_blockwise

        return dequantize_blockwise(self.q, self.scale, self.offset, self.format.block_size, self.format.zero)
