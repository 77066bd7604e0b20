"""AWQ checkpoints (AutoAWQ, version "gemm"): 4-bit integers packed along the output channels.

For a weight [N, K], with g = group_size:

    qweight  int32 [K, N/8]      of every 8 outputs, bits 4·i hold output ORDER[i]
    qzeros   int32 [K/g, N/8]    likewise
    scales   float [K/g, N]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmbuild.errors import UnsupportedError
from llmbuild.quantization.blocks import BlockFormat
from llmbuild.quantization.formats import CONFIG, FLOATS, Parts, described, group_of, matrix, need, option, take, typed
from llmbuild.quantization.integers import Integers, stored_format, unpack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
OUTPUTS = len(ORDER)
AGAIN = 'quantize the model with version "gemm", or convert the unquantized checkpoint'


@dataclass(frozen=True)
class AWQLayout:
    """One weight."""

    shape: tuple[int, int]
    group_size: int
    scale_dtype: torch.dtype
    scattered: bool = False
    row_major: bool = False

    @property
    def label(self) -> str:
        return described("AWQ", 4, self.group_size, self.shape[1])

    @property
    def block_format(self) -> BlockFormat | None:
        return stored_format(
            4, self.shape[1], self.group_size, scale=self.scale_dtype, has_zeros=True, source=self.label
        )

    def rows(self, parts: Mapping[str, Tensor], begin: int, end: int) -> Integers:
        q = unpack_outputs(parts["qweight"], begin, end)
        zero = unpack_outputs(parts["qzeros"], begin, end).to(torch.int16)
        return Integers(4, q, parts["scales"][:, begin:end].T.contiguous(), zero, self.group_size)


def unpack_outputs(words: Tensor, begin: int, end: int) -> Tensor:
    """int32 [rows, N/8] -> uint8 [end - begin, rows]: outputs begin .. end."""
    first = begin // OUTPUTS
    values = unpack(words[:, first : -(-end // OUTPUTS)], 4, 1)
    place = torch.tensor(ORDER).argsort()  # where in a word each output is
    values = values.unflatten(1, (-1, OUTPUTS))[:, :, place].flatten(1)
    return values[:, begin - first * OUTPUTS : end - first * OUTPUTS].T.contiguous()


@dataclass(frozen=True)
class AWQ:
    """The format, as `quantization_config` describes it. group_size: None for one group a row."""

    group_size: int | None
    label: str = "AWQ"
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales")
    notices: tuple[str, ...] = ()

    @property
    def unused(self) -> Mapping[str, str]:
        return {}

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> AWQ:
        """Raises UnsupportedError, naming the option that cannot be read."""
        option(config, "w_bit" if "w_bit" in config else "bits", (4,), hint="AWQ packs 4 bits")
        option(config, "zero_point", (True,), default=True, hint=AGAIN)
        key = "version" if config.get("version") else "format"
        version = config.get(key) or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise UnsupportedError(f"{key} = {version!r} of AWQ is not supported", where=CONFIG, hint=AGAIN)
        return cls(group_of(config, "q_group_size" if "q_group_size" in config else "group_size"))

    def layout(self, module: str, parts: Parts) -> AWQLayout:
        k, words = matrix(need(parts, "qweight", module), "qweight", module)
        typed(parts["qweight"], "qweight", module, (torch.int32,))
        size = min(self.group_size or k, k)
        groups = -(-k // size)
        scales = take(parts, "scales", module, (groups, words * OUTPUTS), FLOATS)
        take(parts, "qzeros", module, (groups, words), (torch.int32,))
        return AWQLayout((words * OUTPUTS, k), size, scales.dtype)
