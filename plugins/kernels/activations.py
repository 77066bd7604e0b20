"""The activations of `llmbuild.plugins.ops` in float32, for the ends of kernels."""

from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr):
    """float32 -> float32. ACTIVATION: one of `ops.ACTIVATIONS`. SLOPE: silu is x · sigmoid(SLOPE · x)."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(SLOPE * x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        y = x * tl.sigmoid(GELU_SCALE * (x + GELU_CUBE * x * x * x))  # (1 + tanh a) / 2 = sigmoid(2 a)
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "sigmoid")
        y = tl.sigmoid(x)
    return y
