"""Weights that a checkpoint stores as 8-bit floats, multiplied as they are stored: their numbers are never rounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbuild.builder.frontend.quantized_weight import QuantizedWeight
from llmbuild.builder.weights import Cast, Map, WeightExpr
from llmbuild.errors import ModelError
from llmbuild.quantization.float8 import Float8Matrix, Float8Weight
from llmbuild.quantization.formats_fp8 import INPUT_SCALE, FP8Layout


@dataclass(frozen=True)
class StoredFloat8(Float8Weight):
    """`source` is a `QuantizedWeight` of an `FP8Layout` that has a `product_block`, below any casts."""

    def number_pieces(self, elements: int) -> Iterator[Float8Matrix]:
        found = stored_float8(self.source)
        assert found is not None
        weight, layout = found
        rows, step = self.shape[0], self.rows_at_once(elements)
        for begin in range(0, rows, step):
            parts = {name: part.load() for name, part in weight.parts.items()}  # mapped anew, as `QuantizedWeight` does
            yield layout.numbers(parts, begin, min(begin + step, rows))


def stored_float8(expr: object) -> tuple[QuantizedWeight, FP8Layout] | None:
    """Return the weight below casts that a checkpoint stores as 8-bit floats, and how; None if it does not."""
    while isinstance(expr, Cast):
        expr = expr.source
    if isinstance(expr, QuantizedWeight) and isinstance(expr.layout, FP8Layout):
        return expr, expr.layout
    return None


def input_scale(weight: QuantizedWeight) -> tuple[WeightExpr, str]:
    """Return the checkpoint's scale of the activations, float32 [1], and a label that is equal for equal scales.

    Raises:
        ModelError: It is no positive number.
    """
    part = weight.parts[INPUT_SCALE]
    value = float(part.load())
    if not 0 < value < float("inf"):
        raise ModelError(f"the scale of the activations of {weight.name!r} is {value}", hint="check the checkpoint")
    return Map(part, one_float, (1,), torch.float32, f"input scale of {weight.name}"), f"the scale {value!r}"


def one_float(scale: Tensor) -> Tensor:
    return scale.float().reshape(1)
