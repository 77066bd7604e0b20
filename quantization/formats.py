"""What a format of quantized checkpoints offers: it says which tensors make a weight, and how.

A format is made from the checkpoint's own description (`quantization_config`), a layout from the tensors of one module:
their shapes and types, and where it matters which columns form a group, that index. Data are read when a weight is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from llmbuild.errors import ModelError, UnsupportedError
from llmbuild.quantization.blocks import BlockFormat
from llmbuild.quantization.integers import Integers

CONFIG = "config.json: quantization_config"


class Part(Protocol):
    """A tensor of the checkpoint; `builder.ir.WeightExpr` has this."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def load(self) -> Tensor: ...


Parts = Mapping[str, Part]  # by the last word of their names


class Layout(Protocol):
    """How the tensors of one module are a weight [N, K].

    Attributes:
        label: How it is stored, for people: "GPTQ int4, groups of 128".
        block_format: The blocks it is, exactly; None when it can only be read dequantized.
        scattered: Whether columns of a group are not neighbours, which is the reason why it is not in blocks.
        row_major: Whether rows of the weight are rows of the tensors, so that a piece reads no more than it needs.
    """

    @property
    def label(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def block_format(self) -> BlockFormat | None: ...

    @property
    def scattered(self) -> bool: ...

    @property
    def row_major(self) -> bool: ...

    def rows(self, parts: Mapping[str, Tensor], begin: int, end: int) -> Integers | Tensor:
        """Return rows begin .. end from the tensors as loaded: integers, or a float32 tensor."""
        ...


class Format(Protocol):
    """One way to store weights.

    Attributes:
        label: Name for reports.
        suffixes: Last words of the names of tensors that make a weight.
        unused: Last words of tensors that say something about activations, and what that is: not used yet.
        notices: Facts for the report.
    """

    @property
    def label(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    @property
    def unused(self) -> Mapping[str, str]: ...

    @property
    def notices(self) -> tuple[str, ...]: ...

    def layout(self, module: str, parts: Parts) -> Layout | None:
        """Return how `parts` make the weight of `module`; None when that is a plain tensor.

        Raises:
            ModelError: A tensor is missing, or does not fit the others or the config.
            UnsupportedError: They mean something that cannot be read exactly.
        """
        ...


INPUT_SCALES = {
    "input_scale": "scales of activations",
    "input_zero_point": "zero points of activations",
    "k_scale": "scales of the KV cache",
    "v_scale": "scales of the KV cache",
    "kv_scale": "scales of the KV cache",
    "q_scale": "scales of queries",
    "prob_scale": "scales of attention",
    "output_scale": "scales of activations",
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def take(parts: Parts, suffix: str, module: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Part:
    """Return a tensor that must be there. Raises ModelError: it is not, or has another shape or type."""
    part = need(parts, suffix, module)
    if tuple(part.shape) != shape:
        raise ModelError(f"tensor '{module}.{suffix}' has shape {list(part.shape)}, {list(shape)} was expected")
    return typed(part, suffix, module, dtypes)


def need(parts: Parts, suffix: str, module: str) -> Part:
    if suffix not in parts:
        found = ", ".join(sorted(parts))
        raise ModelError(
            f"tensor '{module}.{suffix}' is missing: the quantized weight {module!r} has {found} only",
            hint="the checkpoint is incomplete, or its quantization_config belongs to another one",
        )
    return parts[suffix]


def typed(part: Part, suffix: str, module: str, dtypes: tuple[torch.dtype, ...]) -> Part:
    if part.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(part.dtype).removeprefix("torch.")
        raise ModelError(f"tensor '{module}.{suffix}' holds {found}, {known} was expected")
    return part


def matrix(part: Part, suffix: str, module: str) -> tuple[int, int]:
    """Return the shape of a tensor with two axes. Raises UnsupportedError: it has another number of them."""
    if len(part.shape) != 2:
        raise UnsupportedError(
            f"tensor '{module}.{suffix}' has shape {list(part.shape)}; quantized weights are read as matrices only"
        )
    return part.shape[0], part.shape[1]


def option(config: Mapping[str, Any], key: str, known: tuple[Any, ...], *, default: Any = None, hint: str) -> Any:
    """Return a value of the config that must be one of `known`. Raises UnsupportedError, naming key and value."""
    value = config.get(key)
    value = default if value is None else value
    if value not in known or (isinstance(value, bool) and not any(value is each for each in known)):
        listed = ", ".join(str(each) for each in known if each is not None)
        raise UnsupportedError(f"{key} = {value!r} is not supported", where=CONFIG, hint=f"known: {listed}; {hint}")
    return value


def group_of(config: Mapping[str, Any], key: str = "group_size") -> int | None:
    """Return the group size of a config, None for one group a row. Raises ModelError: it is neither."""
    value = config.get(key)
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key} = {value!r} is not a number of columns", where=CONFIG)
    return value


def described(name: str, bits: int, group_size: int, columns: int) -> str:
    """Return "GPTQ int4, groups of 128"."""
    shared = f"groups of {group_size}" if group_size < columns else "a scale a row"
    return f"{name} int{bits}, {shared}"
