"""Keys and values of a cache in 8 bits: rounded where they are appended. The numbers are those of `cache_rounding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cuda.index import Index
from llmbuild.builder.targets.cuda.rules.pointwise import Rule
from llmbuild.builder.targets.cuda.section import MAX, Section, Value
from llmbuild.builder.targets.cuda.views import Indices
from llmbuild.plugins.cache_rounding import INT8_LARGEST

llmbuild = torch.ops.llmbuild


def cache_fp8(section: Section, node: fx.Node, index: Indices) -> Value:
    source, scales = arguments(node)
    x, scale = section.value(source, index), section.value(scales, (Index(),))
    inside = section.emit(f"{node.name}_x", f"tl.div_rn({x.text}, {scale.text})", "float", x, scale)
    return section.emit(node.name, f"float32_to_e4m3({inside.text})", "int", inside)


def cache_int8(section: Section, node: fx.Node, index: Indices, output: int) -> Value:
    """Output 0 are the numbers, output 1 the scales [.., 1]. A value that is NaN counts as infinity."""
    (source,) = arguments(node)
    dims = size(source)

    def magnitude(others: Indices, channel: Index) -> Value:
        x = section.value(source, (*others, channel))
        text = f'tl.where({x.text} == {x.text}, tl.abs({x.text}), float("inf"))'
        return section.emit(f"{node.name}_magnitude", text, "float", x)

    name = f"{node.name}_largest"
    largest = section.reduce(node, name, index[:-1], dims[:-1], dims[-1], magnitude, MAX)
    scale = section.emit(f"{node.name}_scale", f"tl.div_rn({largest.text}, {INT8_LARGEST})", "float", largest)
    if output:
        return scale
    text = f'({scale.text} > 0.0) & ({scale.text} < float("inf"))'
    usable = section.emit(f"{node.name}_usable", text, "bool", scale)
    divisor = section.emit(f"{node.name}_divisor", f"tl.where({usable.text}, {scale.text}, 1.0)", "float", usable)
    x = section.value(source, index)
    text = f"tl.where({usable.text}, tl.div_rn({x.text}, {divisor.text}), 0.0)"
    inside = section.emit(f"{node.name}_x", text, "float", x, usable)
    return section.emit(node.name, f"float32_to_int8({inside.text})", "int", inside)


RULES: dict[Any, Rule] = {llmbuild.cache_fp8.default: cache_fp8}
PARTS: dict[Any, Callable[[Section, fx.Node, Indices, int], Value]] = {llmbuild.cache_int8.default: cache_int8}
