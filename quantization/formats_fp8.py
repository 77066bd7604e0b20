"""8-bit floats with scales, W[n, k] = float(weight[n, k])·scale, the scale of the weight, of row n, or of a block.

    weight                            float8_e4m3 [N, K]
    weight_scale or weight_scale_inv  float, one; [N] or [N, 1]; or [N/rows, K/columns] for blocks (DeepSeek: 128 x 128)
    input_scale                       float, one: of the activations, where they are rounded with a scale of their own

Both names of the scale mean a factor. Without one a weight is never taken as it is: 1 would be a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from llmbuild.errors import ModelError
from llmbuild.quantization.float8 import Float8Matrix
from llmbuild.quantization.formats import CONFIG, FLOATS, INPUT_SCALES, Parts, matrix, need, option, typed

FLOAT8 = (torch.float8_e4m3fn,)
SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALE = "input_scale"
NOT_FLOAT8 = "8-bit floats (e4m3) are the only ones that are read"
BLOCK = (128, 128)  # rows and columns that products with scales of blocks are made for
# What activations share a scale where they are rounded to 8-bit floats too: those of a token, of the block of columns
# of a token, or all, with the `input_scale` of the checkpoint.
Activations = Literal["token", "group", "tensor"]


@dataclass(frozen=True)
class FP8Layout:
    """One weight. block: rows and columns that share a scale. activations: None where they are not rounded."""

    name: str
    shape: tuple[int, int]
    scale: str
    block: tuple[int, int]
    activations: Activations | None = None
    block_format: None = None
    scattered: bool = False
    row_major: bool = True

    @property
    def label(self) -> str:
        rows, columns = self.block
        if columns < self.shape[1] or 1 < rows < self.shape[0]:
            return f"{self.name} float8, blocks of {rows} x {columns}"
        return f"{self.name} float8, " + ("a scale a row" if rows == 1 else "one scale")

    @property
    def product_block(self) -> tuple[int, int] | None:
        """Rows and columns of a scale where the weight can be multiplied as it is stored; None: no product has such."""
        rows, columns = self.block
        if columns >= self.shape[1] and (rows == 1 or rows >= self.shape[0]):
            return (1, self.shape[1])
        return BLOCK if self.block == BLOCK and self.shape[1] % BLOCK[1] == 0 else None

    def numbers(self, parts: Mapping[str, Tensor], begin: int, end: int) -> Float8Matrix:
        """Return rows begin .. end, whole blocks of them, as stored; with scales for `product_block`."""
        rows, columns = self.block
        down, across = -(-self.shape[0] // rows), -(-self.shape[1] // columns)
        scale = parts[self.scale].reshape(down, across).float()
        wanted = torch.arange(begin, end) // rows
        if self.product_block == BLOCK:
            wanted = wanted[::rows]
        return Float8Matrix(parts["weight"][begin:end].contiguous(), scale[wanted].contiguous())

    def rows(self, parts: Mapping[str, Tensor], begin: int, end: int) -> Tensor:
        rows, columns = self.block
        down, across = -(-self.shape[0] // rows), -(-self.shape[1] // columns)
        scale = parts[self.scale].reshape(down, across).float()
        scale = scale[torch.arange(begin, end) // rows].repeat_interleave(columns, dim=1)[:, : self.shape[1]]
        return parts["weight"][begin:end].float() * scale


@dataclass(frozen=True)
class FP8:
    """The format. block: rows and columns that share a scale, None if all or rows do. activations: see `FP8Layout`."""

    block: tuple[int, int] | None
    activations: Activations | None = None
    label: str = "FP8"
    suffixes: tuple[str, ...] = ("weight", *SCALES, INPUT_SCALE)
    notices: tuple[str, ...] = ()

    @property
    def unused(self) -> Mapping[str, str]:
        return INPUT_SCALES

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> FP8:
        """Raises UnsupportedError, naming the option that cannot be read."""
        option(config, "fmt", ("e4m3", "float8_e4m3fn", None), hint=NOT_FLOAT8)
        known = ("dynamic", "static")
        scheme = option(config, "activation_scheme", known, default="dynamic", hint="these activation scales are known")
        block = block_of(config.get("weight_block_size"), "weight_block_size")
        return cls(block, "tensor" if scheme == "static" else "token" if block is None else "group")

    def layout(self, module: str, parts: Parts) -> FP8Layout | None:
        weight = need(parts, "weight", module)
        if weight.dtype in FLOATS and len(parts) == 1:
            return None
        return float8_layout(self.label, module, parts, self.block, self.activations)


def float8_layout(
    label: str, module: str, parts: Parts, block: tuple[int, int] | None, activations: Activations | None
) -> FP8Layout:
    """Return the layout of an 8-bit float weight. Raises ModelError: its scale is missing or of another shape."""
    weight = typed(parts["weight"], "weight", module, FLOAT8)
    n, k = matrix(weight, "weight", module)
    scales = [name for name in SCALES if name in parts]
    if not scales:
        raise ModelError(
            f"tensor '{module}.weight' holds 8-bit floats, but '{module}.weight_scale' is missing",
            hint="the checkpoint is incomplete; without its scale the weight has no values",
        )
    if len(scales) > 1:
        raise ModelError(f"'{module}' has both {scales[0]} and {scales[1]}; only one can be the scale of its weight")
    scale = typed(parts[scales[0]], scales[0], module, FLOATS)
    if activations == "tensor":
        one = typed(need(parts, INPUT_SCALE, module), INPUT_SCALE, module, FLOATS)
        if math.prod(one.shape) != 1:
            raise ModelError(f"tensor '{module}.{INPUT_SCALE}' has shape {list(one.shape)}, one number was expected")
    shared = shared_by(tuple(scale.shape), (n, k), block, f"{module}.{scales[0]}")
    return FP8Layout(label, (n, k), scales[0], shared, activations)


def shared_by(
    scale: tuple[int, ...], weight: tuple[int, int], block: tuple[int, int] | None, name: str
) -> tuple[int, int]:
    """Return how many rows and columns share a scale. Raises ModelError: the tensor's shape says nothing possible."""
    n, k = weight
    sizes = tuple(size for size in scale if size != 1)
    if block is not None:
        down, across = -(-n // block[0]), -(-k // block[1])
        if sizes == tuple(size for size in (down, across) if size != 1):
            return block
        raise ModelError(
            f"tensor {name!r} has shape {list(scale)}, blocks of {block[0]} x {block[1]} of a weight {[n, k]} "
            f"need {[down, across]}"
        )
    if not sizes:
        return (n, k)
    if sizes == (n,) and scale[0] == n:
        return (1, k)
    raise ModelError(
        f"tensor {name!r} has shape {list(scale)}, which is neither one scale nor one a row of a weight {[n, k]}",
        where=CONFIG,
        hint="blocks need their size in the config",
    )


def block_of(value: Any, key: str) -> tuple[int, int] | None:
    """Return the size of blocks from the config. Raises ModelError: it is not one."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise ModelError(f"{key} = {value!r} is not a number of rows and one of columns", where=CONFIG)
    return (value[0], value[1])
