"""Keys and values in 8 bits, rounded before attention appends them: the oracle, and so every accuracy, sees it.

paged_attention(q, k, v, ..) => paged_attention(q, cache_fp8(k, s), cache_fp8(v, t), .., s, t)
paged_attention(q, k, v, ..) => paged_attention(q, a, b, .., s, t) with a, s = cache_int8(k), b, t = cache_int8(v)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbuild.builder.ir import Constant, Map, Program, Rewrite, WeightExpr
from llmbuild.builder.passes.edit import arguments, call, is_call, replace
from llmbuild.builder.passes.fold_weights import new_weight
from llmbuild.builder.passes.linear_inputs import Calibrate, LinearInput
from llmbuild.errors import ConfigError, ModelError
from llmbuild.quantization.cache_scales import fp8_scale
from llmbuild.quantization.compensated import Statistics
from llmbuild.quantization.recipes import Recipe

llmbuild = torch.ops.llmbuild
ATTENTION = llmbuild.paged_attention.default
PARTS = ("keys", "values")  # arguments 1 and 2 of attention


def cache_inputs(program: Program) -> list[LinearInput]:
    """Return what each layer stores, keys (after RoPE) and values: what calibration observes of a cache."""
    return [
        LinearInput(key_of(node.args[3], part), node.args[place], ())
        for node in program.graph.nodes
        if is_call(node, ATTENTION)
        for place, part in enumerate(PARTS, 1)
    ]


def key_of(layer: object, part: str) -> str:
    """Return the name of a layer's keys or values in a statistics file."""
    return f"layers.{layer}.{part}"


@dataclass(frozen=True)
class CalibratedScale:
    """The scale for what `statistics` know under `key`."""

    statistics: Statistics
    key: str

    def __call__(self, _: Tensor) -> Tensor:
        return torch.tensor([fp8_scale(float(self.statistics.absmax(self.key).max()))])


def calibrate_cache(
    program: Program, recipe: Recipe, inputs: Sequence[LinearInput], calibrate: Calibrate | None
) -> None:
    """Set `program.cache_scales` where the recipe wants scales that the checkpoint does not have.

    Args:
        inputs: All that calibration observes, of linears too: whoever calibrates does it once.

    Raises:
        ConfigError: There is no calibration.
        ModelError: Keys or values are not finite; or the checkpoint lacks scales that it should have.
    """
    cache, layers = recipe.kv_cache, len(program.kv_layers)
    if cache is not None and cache.stored and len(program.cache_scales) != layers:
        raise ModelError(
            f"the checkpoint describes an fp8 KV cache, but has no scales of keys and values of all {layers} layers",
            hint="give --kv-cache-dtype int8, or repair the checkpoint",
        )
    if cache is None or not cache.calibrated:
        return
    if calibrate is None:
        raise ConfigError(
            "the scales of an fp8 KV cache need calibration",
            where="--kv-cache-dtype",
            hint="build with BuildConfig or `llmbuild convert`, which calibrate; or take int8, which needs none",
        )
    statistics = calibrate(program, inputs, frozenset())

    def scale(layer: int, part: str) -> WeightExpr:
        key = key_of(layer, part)
        return Map(Constant(torch.zeros(1)), CalibratedScale(statistics, key), (1,), torch.float32, f"scale of {key}")

    program.cache_scales = tuple((scale(n, "keys"), scale(n, "values")) for n in range(layers))


def quantize_cache(program: Program, recipe: Recipe) -> Rewrite:
    """Round what every layer appends, as the recipe says. The count is that of layers."""
    log = Rewrite("quantize_cache", 0)
    if recipe.kv_cache is None:
        return log
    for node in [node for node in program.graph.nodes if is_call(node, ATTENTION)]:
        q, k, v, layer, *rest, _, _ = arguments(node)
        if recipe.kv_cache.dtype == "fp8":
            pairs = zip(PARTS, program.cache_scales[layer], strict=True)
            scales = [new_weight(program, f"{part}_scale_{layer}", scale) for part, scale in pairs]
            stored = [call(node, llmbuild.cache_fp8.default, x, s) for x, s in zip((k, v), scales, strict=True)]
        else:
            rounded = [call(node, llmbuild.cache_int8.default, x) for x in (k, v)]
            stored, scales = ([call(node, operator.getitem, pair, place) for pair in rounded] for place in (0, 1))
        replace(node, call(node, ATTENTION, q, *stored, layer, *rest, *scales))
        log.count += 1
    return log
