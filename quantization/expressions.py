"""Weights that are quantized or dequantized on demand: lazy, computed from another weight expression when loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.primitives import block_format, quantize_blocks
from llmbuild.quantization.recipes import WeightOnly


class Source(Protocol):
    """What is needed of the weight underneath; `builder.ir.WeightExpr` has it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def load(self) -> Tensor: ...

    def sources(self) -> frozenset[str]: ...


@dataclass(frozen=True)
class Quantized:
    """`source` [N, K] rounded to nearest by `scheme`. Nothing is kept between loads."""

    source: Source
    scheme: WeightOnly

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def block_format(self) -> BlockFormat:
        return block_format(self.scheme, self.shape[1])

    def load(self) -> Tensor:
        return self.load_blocks().dequantize().to(self.dtype)

    def load_blocks(self) -> BlockTensor:
        return quantize_blocks(self.source.load(), self.scheme, name=", ".join(sorted(self.sources())))

    def sources(self) -> frozenset[str]:
        return self.source.sources()


@dataclass(frozen=True)
class Dequantized:
    """A weight stored in blocks, taken as a plain tensor."""

    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        return self.source.load()

    def load_blocks(self) -> BlockTensor:
        raise TypeError("a dequantized weight is a plain tensor")

    def sources(self) -> frozenset[str]:
        return self.source.sources()
