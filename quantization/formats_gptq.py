"""GPTQ checkpoints (AutoGPTQ, GPTQModel): integers packed along the input channels.

For a weight [N, K], with g = group_size and p = 32 / bits values a word, value i of a word at bit i·bits:

    qweight  int32 [K/p, N]      words hold neighbours of a column
    qzeros   int32 [K/g, N/p]    words hold neighbours of a row; version 1 stores zero - 1, version 2 ("gptq_v2") zero
    scales   float [K/g, N]
    g_idx    int32 [K]           the group of each input channel; K // g unless channels were sorted (act-order)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmbuild.errors import ModelError, UnsupportedError
from llmbuild.quantization.blocks import BlockFormat
from llmbuild.quantization.formats import (
    CONFIG,
    FLOATS,
    Parts,
    described,
    group_of,
    matrix,
    need,
    option,
    take,
    typed,
)
from llmbuild.quantization.integers import BITS, WORD, Integers, stored_format, unpack, unpack_slice

AGAIN = "quantize the model again, or convert the unquantized checkpoint"


@dataclass(frozen=True)
class GPTQLayout:
    """One weight. groups: int64 [K] when columns of a group are not neighbours (act-order), else None."""

    name: str
    bits: int
    shape: tuple[int, int]
    group_size: int
    symmetric: bool
    zero_shift: int
    scale_dtype: torch.dtype
    groups: Tensor | None
    row_major: bool = False

    @property
    def label(self) -> str:
        return described("GPTQ", self.bits, self.group_size, self.shape[1])

    @property
    def scattered(self) -> bool:
        return self.groups is not None

    @property
    def block_format(self) -> BlockFormat | None:
        if self.scattered:
            return None
        columns, zeros = self.shape[1], not self.symmetric
        return stored_format(
            self.bits, columns, self.group_size, scale=self.scale_dtype, has_zeros=zeros, source=self.label
        )

    def rows(self, parts: Mapping[str, Tensor], begin: int, end: int) -> Integers:
        q = unpack(parts["qweight"][:, begin:end], self.bits, 0).T.contiguous()
        scale = parts["scales"][:, begin:end].T.contiguous()
        zero = unpack_slice(parts["qzeros"], self.bits, 1, begin, end).T.to(torch.int16)
        most = (1 << self.bits) - 1
        if self.zero_shift and bool((zero == most).any()):
            raise UnsupportedError(
                f"'{self.name}.qzeros' stores a zero point as {most}, about which readers of version 1 of the format "
                f"disagree (0 or {most + 1})",
                hint="save the checkpoint as gptq_v2, with gptqmodel",
            )
        zero = zero + self.zero_shift
        if not self.symmetric:
            return Integers(self.bits, q, scale, zero.contiguous(), self.group_size, self.groups)
        if bool((zero != 1 << (self.bits - 1)).any()):
            raise ModelError(
                f"'{self.name}.qzeros' holds zero points besides {1 << (self.bits - 1)}, although the config says "
                "that quantization is symmetric",
                where=f"{CONFIG}: sym = true",
                hint="set sym to false if the zero points are right",
            )
        return Integers(self.bits, q, scale, None, self.group_size, self.groups)


@dataclass(frozen=True)
class GPTQ:
    """The format, as `quantization_config` describes it. group_size: None for one group a row."""

    bits: int
    group_size: int | None
    symmetric: bool
    zero_shift: int
    label: str = "GPTQ"
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    notices: tuple[str, ...] = ()

    @property
    def unused(self) -> Mapping[str, str]:
        return {}

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> GPTQ:
        """Raises UnsupportedError, naming the option that cannot be read."""
        option(config, "bits", BITS, hint=AGAIN)
        key = "checkpoint_format" if config.get("checkpoint_format") else "format"
        version = option(config, key, ("gptq", "gptq_v2", None, ""), hint="other packings belong to one kernel")
        option(config, "is_marlin_format", (False, None), hint="this packing belongs to one kernel; " + AGAIN)
        option(config, "pack_dtype", ("int32", None), hint=AGAIN)
        changed = [key for key, value in (config.get("dynamic") or {}).items() if value and not key.startswith("-:")]
        if changed:
            raise UnsupportedError(
                f"dynamic gives some layers their own options ({', '.join(changed)}), which is not supported",
                where=CONFIG,
                hint="quantize all layers alike; layers left out (-:pattern) are read",
            )
        shift = 0 if version == "gptq_v2" else 1
        return cls(config["bits"], group_of(config), config.get("sym") is True, shift)

    def layout(self, module: str, parts: Parts) -> GPTQLayout:
        words, n = matrix(need(parts, "qweight", module), "qweight", module)
        typed(parts["qweight"], "qweight", module, (torch.int32,))
        k = words * WORD // self.bits
        size = min(self.group_size or k, k)
        groups = -(-k // size)
        scales = take(parts, "scales", module, (groups, n), FLOATS)
        take(parts, "qzeros", module, (groups, n * self.bits // WORD), (torch.int32,))
        order = None
        if "g_idx" in parts:
            take(parts, "g_idx", module, (k,), (torch.int32,))
            order = scattered_groups(parts["g_idx"].load().long(), size, groups, module)
        return GPTQLayout(module, self.bits, (n, k), size, self.symmetric, self.zero_shift, scales.dtype, order)


def scattered_groups(index: Tensor, group_size: int, groups: int, module: str) -> Tensor | None:
    """Return the group of each column, or None when these are neighbours. Raises ModelError: there is no such group."""
    if bool(((index < 0) | (index >= groups)).any()):
        raise ModelError(f"the group index of {module!r} names groups beyond the {groups} that have scales")
    return None if torch.equal(index, torch.arange(len(index)) // group_size) else index
