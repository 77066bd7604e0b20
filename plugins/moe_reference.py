"""The experts of a mixture, in plain torch: the oracle of `llmbuild::moe_experts`.

Which expert a token visits is data, so the loop over the experts that are hit lives inside the op and never in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor


def experts(
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    slope: float,
    limit: float | None,
    shift: float,
) -> Tensor:
    """y[t] = Σ_k scores[t, k] · expert(ids[t, k])(x[t]), summed over k in order, in float32.

    Args:
        x: [T, H].
        ids: [T, K] integers in 0 .. E - 1, those of one token all different.
        scores: [T, K], any float dtype.
        up: [E, 2I, H], gate rows before up rows; [E, I, H] when not gated.
        down: [E, H, I].
        up_bias, down_bias: [E, 2I] or [E, I], and [E, H].
        activation, gated, slope, limit, shift: see `inner`.
    """
    tokens, per_token = ids.shape
    flat = ids.reshape(-1)
    out = x.new_zeros(tokens * per_token, x.shape[1], dtype=torch.float32)
    for expert in torch.unique(flat).tolist():
        pairs = (flat == expert).nonzero()[:, 0]
        rows = x[pairs // per_token]
        hidden = torch.nn.functional.linear(rows, up[expert], None if up_bias is None else up_bias[expert])
        hidden = inner(hidden, activation, gated, slope, limit, shift)
        result = torch.nn.functional.linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
        out[pairs] = result.float() * scores.reshape(-1, 1)[pairs].float()
    return out.reshape(tokens, per_token, -1).sum(dim=1).to(x.dtype)


def inner(hidden: Tensor, activation: str, gated: bool, slope: float, limit: float | None, shift: float) -> Tensor:
    """What lies between an expert's two linears.

    gated:      hidden [.., 2I] = gate | up -> activation(min(gate, limit)) · (clip(up, -limit, limit) + shift)
    not gated:  activation(hidden)

    `slope` belongs to silu alone: x · sigmoid(slope · x).
    """
    if not gated:
        return activate(hidden, activation, slope)
    gate, up = hidden.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activate(gate, activation, slope) * (up + shift)


def activate(x: Tensor, activation: str, slope: float) -> Tensor:
    from llmbuild.plugins import ops

    if activation == "silu" and slope != 1.0:
        return x * torch.sigmoid(slope * x)
    return ops.activate(x, activation)
