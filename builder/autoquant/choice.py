"""A choice of recipes as a quant config: the recipe of most weights, and what other weights follow instead."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence

from llmbuild.builder.autoquant.units import Unit
from llmbuild.builder.ir import Program
from llmbuild.builder.passes.quantize_weights import lm_head, role_of, router_weights
from llmbuild.builder.quant_config import VERSION, Layer, QuantConfig
from llmbuild.quantization.recipes import Plain, find_recipe

NONE = "none"


def quant_config(program: Program, units: Sequence[Unit], recipes: Sequence[str]) -> QuantConfig:
    """Return the config under which each unit follows its recipe and no other weight is rounded.

    Args:
        program: As `find_units` had it.
        recipes: Of each unit.
    """
    base = most_common(program, units, recipes)
    layers: list[Layer] = []
    exclude: list[str] = []
    for unit, recipe in zip(units, recipes, strict=True):
        if recipe == NONE:
            exclude += unit.tensors if base != NONE else ()
        elif recipe != base or getattr(find_recipe(base), unit.role) != find_recipe(base).linear:
            layers += [Layer(pattern=glob.escape(tensor), recipe=recipe) for tensor in unit.tensors]
    exclude += rounded_besides(program, units, base)
    patterns = tuple(glob.escape(tensor) for tensor in exclude)
    return QuantConfig(version=VERSION, quant=base, layers=tuple(layers), exclude=patterns)


def most_common(program: Program, units: Sequence[Unit], recipes: Sequence[str]) -> str:
    """Return the recipe of most numbers, "none" only if there is no other."""
    numbers: dict[str, int] = {}
    for unit, recipe in zip(units, recipes, strict=True):
        if recipe != NONE:
            own = sum(math.prod(program.weights[weight.name].shape) for weight in unit.weights)
            numbers[recipe] = numbers.get(recipe, 0) + own
    return max(sorted(numbers), key=numbers.__getitem__, default=NONE)


def rounded_besides(program: Program, units: Sequence[Unit], base: str) -> list[str]:
    """Return the checkpoint names of matrices of no unit that the recipe would round."""
    chosen = {weight for unit in units for weight in unit.weights}
    head, routers, recipe = lm_head(program), router_weights(program), find_recipe(base)
    found: set[str] = set()
    for node in program.graph.nodes:
        expr = program.weight_of(node)
        if expr is None or len(expr.shape) < 2 or node in chosen or node in routers:
            continue
        role, _ = role_of(program, node, head)
        if role is not None and not isinstance(getattr(recipe, role), Plain):
            found |= expr.sources()
    return sorted(found)
