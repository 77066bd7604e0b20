"""Weights that checkpoints hold as integers: what all such formats have in common, and the blocks they are.

    W[n, k] = scale[n, g]·(q[n, k] - zero[n, g]),  g the group of column k

Blocks have one zero for the whole weight, so that another zero becomes an offset:

    scale·(q - zero) = scale·(q - middle) + scale·(middle - zero)

In float32 both products are exact when `scale` has 16 bits (at most 11 significant ones, times 8 of an integer), and so
is their sum, which is the left side: nothing is rounded. With a float32 scale that would not hold, see `stored_format`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.primitives import spread

WORD = 32  # bits of the integers that values are packed into
BITS = (4, 8)
_EXACT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Integers:
    """Rows of a weight, unpacked and otherwise as stored.

    Attributes:
        bits: Width of q.
        q: uint8 [N, K], 0 .. 2**bits - 1; signed values have 2**(bits - 1) added.
        scale: float16, bfloat16 or float32 [N, G].
        zero: int16 [N, G]; None: the middle, 2**(bits - 1), everywhere.
        group_size: Columns of a group.
        groups: int64 [K], the group of each column; None: `group_size` neighbours share one.
    """

    bits: int
    q: Tensor
    scale: Tensor
    zero: Tensor | None
    group_size: int
    groups: Tensor | None = None

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def dequantize(self) -> Tensor:
        """Return the float32 [N, K] weight: the formula above, rounded once."""
        zero = self.middle if self.zero is None else self._columns(self.zero)
        return self._columns(self.scale).float() * (self.q.to(torch.int16) - zero).float()

    def to_blocks(self, form: BlockFormat) -> BlockTensor:
        """Return the same values in blocks of `form`, which `stored_format` made."""
        assert self.groups is None
        blocks = -(-self.q.shape[1] // form.block_size)
        group = torch.arange(blocks) * form.block_size // self.group_size
        scale = self.scale.float()
        offset = None if self.zero is None else (scale * (self.middle - self.zero).float())[:, group]
        return BlockTensor(form, self.q, scale[:, group], offset)

    def _columns(self, per_group: Tensor) -> Tensor:
        if self.groups is not None:
            return per_group[:, self.groups]
        return spread(per_group, self.group_size, self.q.shape[1])


def stored_format(
    bits: int, columns: int, group_size: int, *, scale: torch.dtype, has_zeros: bool, source: str
) -> BlockFormat | None:
    """Return the blocks that hold such integers exactly, or None when only dequantized values do.

    Rows with a single scale are one block; of 32 columns, the scale repeated, where targets could not cut it.
    """
    if has_zeros and scale not in _EXACT:
        return None
    size = group_size if group_size < columns else (columns if columns % 32 == 0 else 32)
    return BlockFormat(bits, size, 1 << (bits - 1), has_offset=has_zeros, source=source)


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words along `dim` (0 or 1): value i of a word is at bit i·bits. Returns uint8, 32 / bits as long."""
    per_word = WORD // bits
    shape = list(words.shape)
    shape.insert(dim + 1, per_word)
    out = torch.empty(shape, dtype=torch.uint8)
    for place in range(per_word):
        out.select(dim + 1, place).copy_((words >> (bits * place)) & ((1 << bits) - 1))
    return out.flatten(dim, dim + 1)


def unpack_slice(words: Tensor, bits: int, dim: int, begin: int, end: int) -> Tensor:
    """Return values begin .. end along `dim` of `unpack(words, bits, dim)`; touches the words that hold them."""
    per_word = WORD // bits
    first = begin // per_word
    some = words.narrow(dim, first, -(-end // per_word) - first)
    return unpack(some, bits, dim).narrow(dim, begin - first * per_word, end - begin)
