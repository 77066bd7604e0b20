"""Rows as 8-bit numbers: what `quantize_rows` adds to the end of a row program, whatever the chain before it is.

dynamic   scale = max|x| / largest over the row, which the program holds      static   scale: one number, loaded
q = round(x / scale), the store's rounding for float8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, size
from llmbuild.builder.targets.cuda.index import Index
from llmbuild.builder.targets.cuda.section import MAX, Section, Value, literal
from llmbuild.builder.targets.cuda.views import Indices
from llmbuild.plugins.scaled_ops import INVERSE, TINY

llmbuild = torch.ops.llmbuild


def quantize_rows(section: Section, node: fx.Node, index: Indices, output: int) -> Value:
    """Output 0 is q, output 1 its scale."""
    x, scale, dtype = arguments(node)
    if scale is None:
        found = row_scale(section, node, x, index[:-1], dtype)
    else:
        found = section.value(scale, (Index(),))
    if output == 1:
        return found
    inverse = section.emit(f"{node.name}_inverse", f"tl.div_rn(1.0, {found.text})", "float", found)
    value = section.value(x, index)
    scaled = section.emit(node.name, f"{value.text} * {inverse.text}", "float", value, inverse)
    if dtype == torch.float8_e4m3fn:
        return scaled  # storing rounds, and takes what is too large to 448
    text = f"float32_to_int8(tl.where({scaled.text} == {scaled.text}, {scaled.text}, 0.0))"
    return section.emit(node.name, text, "int", scaled)


def row_scale(section: Section, node: fx.Node, x: fx.Node, others: Indices, dtype: torch.dtype) -> Value:
    dims = size(x)

    def magnitude(at: Indices, channel: Index) -> Value:
        value = section.value(x, (*at, channel))
        text = f"tl.abs({value.text})"
        if dtype == torch.int8:  # a maximum passes over NaN, and so would the integer: the scale must tell
            text = f'tl.where({value.text} == {value.text}, {text}, float("inf"))'
        return section.emit(f"{node.name}_magnitude", text, "float", value)

    name = f"{node.name}_largest"
    largest = section.reduce(node, name, others, dims[:-1], dims[-1], magnitude, MAX)
    text = f"{largest.text} * {literal(INVERSE[dtype], 'float')}"
    raw = section.emit(f"{node.name}_raw_scale", text, "float", largest)
    text = f"tl.where({raw.text} < {literal(TINY, 'float')}, 1.0, {raw.text})"
    return section.emit(f"{node.name}_scale", text, "float", raw)


PARTS: dict[Any, Callable[[Section, fx.Node, Indices, int], Value]] = {llmbuild.quantize_rows.default: quantize_rows}
