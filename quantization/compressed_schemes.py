"""`config_groups` of compressed-tensors: which modules are stored how.

A group has `targets`: names of modules, "re:pattern" of names, or names of classes, all of which mean linears here; and
under `weights` how their weights are stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmbuild.errors import ModelError
from llmbuild.quantization.formats import CONFIG, group_of, option
from llmbuild.quantization.formats_fp8 import BLOCK, NOT_FLOAT8, Activations, block_of
from llmbuild.quantization.integers import BITS

PACKED = "pack-quantized"
FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized")
ORDERS = ("group", "dynamic", True, "weight", "static", False, None)  # the first three sort columns into groups
AGAIN = "quantize the model again, or convert the unquantized checkpoint"


@dataclass(frozen=True)
class Scheme:
    """How one group of modules is stored.

    group_size: None for a scale a row, or one for all when `single`. ordered: whether columns were sorted into groups.
    activations: which of them share a scale where they are 8-bit floats, as `FP8Layout` says it.
    """

    targets: tuple[str, ...]
    packed: bool
    is_float: bool
    bits: int
    symmetric: bool
    group_size: int | None
    single: bool
    block: tuple[int, int] | None
    ordered: bool
    activations: Activations | None = None


def read_scheme(name: str, group: Mapping[str, Any], config: Mapping[str, Any]) -> Scheme:
    """Read one of `config_groups`. Raises UnsupportedError, naming what cannot be read."""
    weights = group["weights"]
    hint = f"in config_groups.{name}; {AGAIN}"
    stored = option({"format": group.get("format") or config.get("format")}, "format", FORMATS, hint=hint)
    is_float = option(weights, "type", ("int", "float"), default="int", hint=hint) == "float"
    known: tuple[int, ...] = (8,) if is_float else BITS
    bits = option(weights, "num_bits", known, default=8, hint=f"{hint}; {NOT_FLOAT8}" if is_float else hint)
    strategies = ("tensor", "channel", "block") if is_float else ("tensor", "channel", "group")
    implied = {None: "tensor", -1: "channel"}.get(weights.get("group_size"), "group")
    strategy = option(weights, "strategy", strategies, default=implied, hint=hint)
    option(weights, "symmetric", (True,) if is_float else (True, False), default=True, hint=hint)
    option(weights, "dynamic", (False, None), hint=hint)
    block = block_of(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise ModelError(f"config_groups.{name} has blocks without a block_structure", where=CONFIG)
    return Scheme(
        targets=tuple(group.get("targets") or ()),
        packed=stored == PACKED,
        is_float=is_float,
        bits=bits,
        symmetric=weights.get("symmetric", True),
        group_size=group_of(weights) if strategy == "group" else None,
        single=strategy == "tensor",
        block=block,
        ordered=option(weights, "actorder", ORDERS, hint=hint) in ("group", "dynamic", True),
        activations=float8_activations(group.get("input_activations")) if is_float else None,
    )


def float8_activations(described: Any) -> Activations | None:
    """Return which activations share a scale; None if they are not rounded to 8-bit floats, or in another way."""
    if not isinstance(described, dict) or described.get("type") != "float" or described.get("num_bits") != 8:
        return None
    if not described.get("dynamic"):
        return "tensor" if described.get("strategy") == "tensor" else None
    if described.get("strategy") == "group":
        return "group" if described.get("group_size") == BLOCK[1] else None
    return "token" if described.get("strategy") == "token" else None


def scheme_for(module: str, schemes: tuple[Scheme, ...]) -> Scheme:
    """Return the scheme of a module: the first that names it, else the first of its class."""
    for each in schemes:
        if any(names(target, module) for target in each.targets):
            return each
    for each in schemes:
        if any(target[:1].isupper() and target.isidentifier() for target in each.targets):
            return each
    raise ModelError(f"{module!r} is stored quantized, but no targets of config_groups match it", where=CONFIG)


def names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module
