"""Scales of an fp8 KV cache that a checkpoint stores: x is about scale · e4m3, for the keys and values of each layer.

compressed-tensors calls them `..self_attn.k_scale` and `..v_scale`, NVIDIA's Model Optimizer `..k_proj.k_scale` and
`..v_proj.v_scale`; a `kv_scale` is both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbuild.builder.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmbuild.builder.ir import Map, WeightExpr
from llmbuild.errors import ModelError
from llmbuild.quantization.cache_scales import checked_scale

CACHE_SUFFIXES = {"k_scale": ("keys",), "v_scale": ("values",), "kv_scale": ("keys", "values")}
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class StoredScale:
    """A scale as the checkpoint has it, as float32 [1]."""

    name: str

    def __call__(self, stored: Tensor) -> Tensor:
        if stored.numel() != 1:
            raise ModelError(
                f"tensor {self.name!r} holds {stored.numel()} scales; one for all heads is known",
                hint="--kv-cache-dtype int8 does not use them",
            )
        return torch.tensor([checked_scale(float(stored), self.name)])


def cache_scales(stored: SafetensorsCheckpoint) -> tuple[tuple[WeightExpr, WeightExpr], ...]:
    """Return the scales of keys and values by layer; nothing unless every layer has both."""
    found: dict[int, dict[str, WeightExpr]] = {}
    for name in stored.names():
        layer = LAYER.search(name)
        for part in CACHE_SUFFIXES.get(name.rpartition(".")[2], ()):
            if layer is not None:
                scale = Map(stored.weight(name), StoredScale(name), (1,), torch.float32, name)
                found.setdefault(int(layer[1]), {})[part] = scale
    if sorted(found) != list(range(len(found))) or any(len(parts) < 2 for parts in found.values()):
        return ()
    return tuple((found[layer]["keys"], found[layer]["values"]) for layer in range(len(found)))
