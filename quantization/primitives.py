"""Round-to-nearest quantization of a matrix into blocks. Deterministic: ties go to the even value."""

from __future__ import annotations

import torch
from torch import Tensor

from llmbuild.errors import ModelError
from llmbuild.quantization.blocks import BlockFormat, BlockTensor
from llmbuild.quantization.recipes import PerChannel, WeightOnly

CHUNK = 1 << 22  # elements in float32 at a time, so that a large matrix needs little beside its result


def block_format(scheme: WeightOnly, columns: int) -> BlockFormat:
    """Return the format that `scheme` gives a matrix of `columns` input channels."""
    size = columns if isinstance(scheme.granularity, PerChannel) else min(scheme.granularity.size, columns)
    zero = 1 << (scheme.bits - 1) if scheme.symmetric else 0
    return BlockFormat(scheme.bits, size, zero, has_offset=not scheme.symmetric, source=str(scheme))


def quantize_blocks(weight: Tensor, scheme: WeightOnly, *, name: str, first_row: int = 0) -> BlockTensor:
    """Round `weight` [N, K] to nearest, block by block; |W - W'| <= scale / 2 everywhere.

    Symmetric: scale = max|W| / (2**(bits-1) - 1), so that 0 stays 0. Asymmetric: q counts from the block's minimum,
    which becomes the offset. A block that is all zero (symmetric) or constant (asymmetric) is kept exactly, with
    scale 1.

    Args:
        weight: Any float dtype.
        name: The tensor's name, for the error.
        first_row: Where these rows begin in the tensor of that name, for the error.

    Raises:
        ModelError: `weight` holds NaN or infinity, or an asymmetric block spans more than float32 can hold.
    """
    rows, columns = weight.shape
    form = block_format(scheme, columns)
    blocks = -(-columns // form.block_size)
    q = torch.empty(rows, columns, dtype=torch.uint8)
    scale = torch.empty(rows, blocks)
    offset = torch.empty(rows, blocks) if form.has_offset else None
    step = max(1, CHUNK // columns)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        values = weight[part].float()
        scale[part], low = block_scales(values, form, name=name, first_row=first_row + begin)
        if offset is not None and low is not None:
            offset[part] = low
        wide = None if low is None else spread(low, form.block_size, columns)
        levels = to_levels(values, spread(scale[part], form.block_size, columns), wide, form)
        q[part] = levels.to(torch.uint8)
    return BlockTensor(form, q, scale, offset)


def block_scales(values: Tensor, form: BlockFormat, *, name: str, first_row: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return scale and offset of float32 [N, K] values, each [N, ceil(K / block_size)]. Raises as `quantize_blocks`."""
    low, high = block_range(values, form.block_size)  # NaN and infinity show in them
    refuse_non_finite(values, (low, high), first_row, name)
    if not form.has_offset:
        return usable(torch.maximum(-low, high) / (2 ** (form.bits - 1) - 1)), None
    refuse_overflow(high - low, first_row, name)
    return usable((high - low) / (2**form.bits - 1)), low


def to_levels(values: Tensor, scale: Tensor, offset: Tensor | None, form: BlockFormat) -> Tensor:
    """Return q of float32 values as floats 0 .. 2**bits - 1; scale and offset of each value."""
    above = values if offset is None else values - offset
    return (above / scale).round_().add_(form.zero).clamp_(0, 2**form.bits - 1)


def spread(per_block: Tensor, block_size: int, columns: int) -> Tensor:
    """Return [N, ceil(K / block_size)] values repeated over the columns of their blocks, [N, K]."""
    rows, blocks = per_block.shape
    return per_block[:, :, None].expand(rows, blocks, block_size).reshape(rows, -1)[:, :columns]


def block_range(values: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each block, float32 [N, ceil(K / block_size)] each."""
    rows, columns = values.shape
    missing = -columns % block_size
    if missing:  # the last value again changes neither the minimum nor the maximum of the last block
        values = torch.cat((values, values[:, -1:].expand(rows, missing)), dim=1)
    blocks = values.reshape(rows, -1, block_size)
    return blocks.amin(dim=-1), blocks.amax(dim=-1)


def usable(scale: Tensor) -> Tensor:
    """Return `scale` with 1 where it is zero (or too small to divide by): every value of the block is then 0 steps."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(scale < tiny, torch.ones_like(scale), scale)


def refuse_non_finite(values: Tensor, ranges: tuple[Tensor, Tensor], first_row: int, name: str) -> None:
    if all(bool(torch.isfinite(edge).all()) for edge in ranges):
        return
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        row, column = (int(index) for index in bad.nonzero()[0])
        raise ModelError(
            f"weight {name!r} holds {values[row, column].item()} and cannot be quantized",
            where=f"row {first_row + row}, column {column}; {int(bad.sum())} such values or more",
            hint="check the checkpoint; `--quant none` converts it as it is",
        )


def refuse_overflow(span: Tensor, first_row: int, name: str) -> None:
    wide = torch.isinf(span)
    if bool(wide.any()):
        row, block = (int(index) for index in wide.nonzero()[0])
        raise ModelError(
            f"weight {name!r} spans more than float32 can hold and cannot be quantized",
            where=f"row {first_row + row}, block {block}",
            hint="use a symmetric scheme, or check the checkpoint",
        )
