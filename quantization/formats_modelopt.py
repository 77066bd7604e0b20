"""Checkpoints of NVIDIA's Model Optimizer (`hf_quant_config.json`): 8-bit floats, and int4 of AWQ.

For an int4 weight [N, K] in groups of g columns, signed values in two's complement:

    weight           uint8 [N/2, K]    row 2·i in the low half of row i, row 2·i + 1 in the high half
    weight_scale     float [N, K/g]
    pre_quant_scale  float [K]         factors of the activations, where they are not part of the layer before
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmbuild.errors import UnsupportedError
from llmbuild.quantization.blocks import BlockFormat
from llmbuild.quantization.formats import (
    CONFIG,
    FLOATS,
    INPUT_SCALES,
    Format,
    Parts,
    described,
    group_of,
    matrix,
    need,
    option,
    take,
    typed,
)
from llmbuild.quantization.formats_fp8 import FP8, Activations
from llmbuild.quantization.integers import Integers, stored_format

NAME = "ModelOpt"
# quant_algo -> size of the blocks that share a scale, and which activations do
FLOAT8_KINDS: dict[str, tuple[tuple[int, int] | None, Activations | None]] = {
    "FP8": (None, "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": (None, "token"),
    "FP8_PB_WO": ((128, 128), None),
}
INT4 = "W4A16_AWQ"


def parse(config: Mapping[str, Any]) -> Format:
    """Return the format. Raises UnsupportedError, naming the option that cannot be read."""
    known = (*FLOAT8_KINDS, INT4)
    algo = option(config, "quant_algo", known, hint="export the model as one of these, or convert the unquantized one")
    if algo != INT4:
        return FP8(*FLOAT8_KINDS[algo], label=NAME)
    option(config, "has_zero_point", (False, None), hint="ModelOpt writes symmetric int4")
    return Int4(group_of(config))


@dataclass(frozen=True)
class Int4Layout:
    """One weight of int4."""

    shape: tuple[int, int]
    group_size: int
    scale_dtype: torch.dtype
    scattered: bool = False
    row_major: bool = True

    @property
    def label(self) -> str:
        return described(NAME, 4, self.group_size, self.shape[1])

    @property
    def block_format(self) -> BlockFormat | None:
        return stored_format(
            4, self.shape[1], self.group_size, scale=self.scale_dtype, has_zeros=False, source=self.label
        )

    def rows(self, parts: Mapping[str, Tensor], begin: int, end: int) -> Integers:
        pairs = parts["weight"][begin // 2 : -(-end // 2)]
        values = torch.stack((pairs & 0x0F, pairs >> 4), dim=1).flatten(0, 1)
        q = values[begin % 2 : begin % 2 + end - begin] ^ 8  # flipping the sign bit adds 8
        return Integers(4, q, parts["weight_scale"][begin:end], None, self.group_size)


@dataclass(frozen=True)
class Int4:
    """The format W4A16_AWQ. group_size: None for one group a row."""

    group_size: int | None
    label: str = NAME
    suffixes: tuple[str, ...] = ("weight", "weight_scale", "pre_quant_scale")
    notices: tuple[str, ...] = ()

    @property
    def unused(self) -> Mapping[str, str]:
        return INPUT_SCALES

    def layout(self, module: str, parts: Parts) -> Int4Layout | None:
        if "pre_quant_scale" in parts:
            raise UnsupportedError(
                f"tensor '{module}.pre_quant_scale' scales the activations of a layer, which is not supported yet",
                where=CONFIG,
                hint="export with the scales folded into the layer before, or convert the unquantized checkpoint",
            )
        weight = parts.get("weight")
        if weight is not None and weight.dtype in FLOATS and len(parts) == 1:
            return None
        pairs, k = matrix(typed(need(parts, "weight", module), "weight", module, (torch.uint8,)), "weight", module)
        size = min(self.group_size or k, k)
        scale = take(parts, "weight_scale", module, (2 * pairs, -(-k // size)), FLOATS)
        return Int4Layout((2 * pairs, k), size, scale.dtype)
