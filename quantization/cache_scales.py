"""The scale of an fp8 KV cache: what the numbers of a layer's keys, or of its values, are multiplied with."""

from __future__ import annotations

import math

from llmbuild.errors import ModelError

E4M3_LARGEST = 448.0
# Keys and values may be this many times larger than calibration saw them before they are cut off. It costs nothing:
# floats have the same relative step at half the size, and 224, where the largest comes to lie, is 14336 times the
# smallest number of e4m3 that has it.
HEADROOM = 2.0


def fp8_scale(absmax: float) -> float:
    """Return the scale for values of at most `absmax`. Where all were zero, any scale does: 1."""
    return absmax * HEADROOM / E4M3_LARGEST if absmax > 0 else 1.0


def checked_scale(value: float, name: str) -> float:
    """Return a scale that a checkpoint stores. Raises ModelError: it is no positive finite number."""
    if not (math.isfinite(value) and value > 0):
        raise ModelError(
            f"tensor {name!r} holds {value}, which is no scale of a KV cache",
            hint="the checkpoint is damaged; --kv-cache-dtype int8 does not use it",
        )
    return value
