"""compressed-tensors checkpoints (llm-compressor): int4 and int8, packed or one a byte, and 8-bit floats.

For a weight [N, K] in groups of g columns, with p = 32 / bits values a word, value i of a word at bit i·bits:

    pack-quantized    weight_packed      int32 [N, ceil(K/p)]   q + 2**(bits - 1), neighbours of a row in a word
                      weight_shape       int64 [2]              N and K
                      weight_zero_point  int32 [ceil(N/p), K/g] likewise, neighbours of a column in a word; or int8
                      weight_g_idx       int32 [K]              the group of each column, with actorder "group"
    int-quantized     weight             int8 [N, K]            with weight_zero_point int8 [N, K/g]
    float-quantized   weight             float8_e4m3 [N, K]     see formats_fp8.py
    all               weight_scale       float [N, K/g]; or [N, 1], [1]

`config_groups` says which modules are stored how: by name, by "re:pattern", or by class, which is a linear's here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmbuild.errors import ModelError, UnsupportedError
from llmbuild.quantization.blocks import BlockFormat
from llmbuild.quantization.compressed_schemes import AGAIN, Scheme, read_scheme, scheme_for
from llmbuild.quantization.formats import (
    CONFIG,
    FLOATS,
    INPUT_SCALES,
    Layout,
    Parts,
    described,
    matrix,
    need,
    take,
    typed,
)
from llmbuild.quantization.formats_fp8 import INPUT_SCALE, float8_layout
from llmbuild.quantization.formats_gptq import scattered_groups
from llmbuild.quantization.integers import WORD, Integers, stored_format, unpack, unpack_slice

NAME = "compressed-tensors"
SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class CompressedLayout:
    """One weight of integers. groups: int64 [K] when columns of a group are not neighbours, else None."""

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    group_size: int
    scale_dtype: torch.dtype
    has_zeros: bool
    groups: Tensor | None
    row_major: bool = True

    @property
    def label(self) -> str:
        if self.scheme.single:
            return f"{NAME} int{self.scheme.bits}, one scale"
        return described(NAME, self.scheme.bits, self.group_size, self.shape[1])

    @property
    def scattered(self) -> bool:
        return self.groups is not None

    @property
    def block_format(self) -> BlockFormat | None:
        if self.scattered:
            return None
        kind: dict[str, Any] = dict(scale=self.scale_dtype, has_zeros=self.has_zeros, source=self.label)
        return stored_format(self.scheme.bits, self.shape[1], self.group_size, **kind)

    def rows(self, parts: Mapping[str, Tensor], begin: int, end: int) -> Integers:
        bits = self.scheme.bits
        middle = 1 << (bits - 1)
        if self.scheme.packed:
            q = unpack(parts["weight_packed"][begin:end], bits, 1)[:, : self.shape[1]].contiguous()
        else:
            values = parts["weight"][begin:end].to(torch.int16) + middle
            if bool(((values < 0) | (values >= 1 << bits)).any()):
                raise ModelError(f"'{self.module}.weight' holds values that are not of {bits} bits")
            q = values.to(torch.uint8)
        zero = None
        if self.has_zeros:
            stored = parts["weight_zero_point"]
            if stored.dtype is torch.int32:
                zero = unpack_slice(stored, bits, 0, begin, end).to(torch.int16)
            else:
                zero = self._by_row(stored, begin, end).to(torch.int16) + middle
        scale = self._by_row(parts["weight_scale"], begin, end)
        return Integers(bits, q, scale, zero, self.group_size, self.groups)

    def _by_row(self, values: Tensor, begin: int, end: int) -> Tensor:
        """One for the whole weight, or one a row or group -> [rows, groups]."""
        if self.scheme.single:
            return values.reshape(1, 1).expand(end - begin, 1)
        return values.reshape(self.shape[0], -1)[begin:end]


@dataclass(frozen=True)
class CompressedTensors:
    """The format, as `quantization_config` describes it."""

    schemes: tuple[Scheme, ...]
    notices: tuple[str, ...]
    label: str = NAME
    suffixes: tuple[str, ...] = SUFFIXES

    @property
    def unused(self) -> Mapping[str, str]:
        return INPUT_SCALES

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> CompressedTensors:
        """Raises UnsupportedError, naming the option that cannot be read."""
        sparsity = (config.get("sparsity_config") or {}).get("format") or "dense"
        if sparsity != "dense":
            raise UnsupportedError(f"sparsity_config.format = {sparsity!r} is not supported", where=CONFIG, hint=AGAIN)
        if (config.get("transform_config") or {}).get("config_groups"):
            raise UnsupportedError(
                "transform_config rotates activations while the model runs, which is not supported",
                where=CONFIG,
                hint=AGAIN,
            )
        groups = config.get("config_groups") or {}
        if not isinstance(groups, dict) or not groups:
            raise ModelError("config_groups says nothing about any weight", where=CONFIG)
        notices: list[str] = []
        schemes = tuple(read_scheme(name, group, config) for name, group in groups.items() if group.get("weights"))
        known = {each.activations for each in schemes}
        if None in known and any(group.get("input_activations") for group in groups.values()):
            notices.append("activations, which the checkpoint describes as quantized, are computed unrounded")
        return cls(schemes, tuple(notices), suffixes=(*SUFFIXES, *((INPUT_SCALE,) if None not in known else ())))

    def layout(self, module: str, parts: Parts) -> Layout | None:
        weight = parts.get("weight")
        if weight is not None and weight.dtype in FLOATS and len(parts) == 1:
            return None
        found = scheme_for(module, self.schemes)
        if found.is_float:
            need(parts, "weight", module)
            return float8_layout(NAME, module, parts, found.block, found.activations)
        return integer_layout(found, module, parts)


def integer_layout(found: Scheme, module: str, parts: Parts) -> CompressedLayout:
    """Return the layout of int4 or int8. Raises ModelError: tensors are missing, or do not fit each other."""
    if found.packed:
        n, words = matrix(need(parts, "weight_packed", module), "weight_packed", module)
        typed(parts["weight_packed"], "weight_packed", module, (torch.int32,))
        stated = take(parts, "weight_shape", module, (2,), (torch.int64, torch.int32)).load().tolist()
        k = stated[1]
        if stated[0] != n or -(-k * found.bits // WORD) != words:
            raise ModelError(
                f"'{module}.weight_shape' says {stated}, but {[n, words]} words of {found.bits}-bit "
                "values do not hold that"
            )
    else:
        n, k = matrix(need(parts, "weight", module), "weight", module)
        typed(parts["weight"], "weight", module, (torch.int8,))
    size = min(found.group_size or k, k)
    groups = -(-k // size)
    scale = typed(need(parts, "weight_scale", module), "weight_scale", module, FLOATS)
    expect_one_each(tuple(scale.shape), n, groups, found.single, f"{module}.weight_scale")
    zeros = "weight_zero_point" in parts  # some versions wrote those of symmetric weights too
    if zeros or not found.symmetric:
        zero = need(parts, "weight_zero_point", module)
        if zero.dtype is torch.int32:
            take(parts, "weight_zero_point", module, (-(-n * found.bits // WORD), groups), (torch.int32,))
        else:
            typed(zero, "weight_zero_point", module, (torch.int8,))
            expect_one_each(tuple(zero.shape), n, groups, found.single, f"{module}.weight_zero_point")
    order = None
    if "weight_g_idx" in parts:
        index = take(parts, "weight_g_idx", module, (k,), (torch.int32, torch.int64))
        order = scattered_groups(index.load().long(), size, groups, module)
    elif found.ordered:
        raise ModelError(
            f"tensor '{module}.weight_g_idx' is missing: the config says that columns were sorted into groups",
            where=f"{CONFIG}: actorder",
        )
    return CompressedLayout(module, found, (n, k), size, scale.dtype, zeros, order)


def expect_one_each(shape: tuple[int, ...], n: int, groups: int, single: bool, name: str) -> None:
    """Require one number, or one a row and group. Raises ModelError."""
    wanted = ((), (1,), (1, 1)) if single else ((n, groups), *(((n,),) if groups == 1 else ()))
    if shape not in wanted:
        raise ModelError(f"tensor {name!r} has shape {list(shape)}, {list(wanted[-1 if single else 0])} was expected")
