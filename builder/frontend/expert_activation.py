"""Which activation an experts module has: fitted to the numbers that its code gives, then proven on a grid.

Models spell the same gate in many ways (attributes called alpha, swiglu_limit, act_fn, ...). What they compute is
activation(min(gate, limit)) · (clip(up, -limit, limit) + shift), and a handful of evaluations tells all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmbuild.errors import UnsupportedError
from llmbuild.plugins.moe_reference import inner
from llmbuild.plugins.ops import ACTIVATIONS

_FAR = 1e4  # beyond any limit that a model has
_GATES = (-30.0, -8.5, -7.5, -6.0, -3.0, -1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0, 3.0, 6.0, 7.5, 8.5, 30.0)


class ExpertActivation(NamedTuple):
    """The last arguments of `llmbuild::moe_experts`."""

    activation: str
    gated: bool
    slope: float = 1.0
    limit: float | None = None
    shift: float = 0.0


def identify(function: Callable[[Tensor], Tensor], module: Any, *, gated: bool, interleaved: bool) -> ExpertActivation:
    """Return what `function` computes: from [N, 2I] to [N, I] when gated, else elementwise.

    Args:
        module: The experts module, whose attributes hold the exact numbers.
        interleaved: gate and up alternate along the last axis.

    Raises:
        UnsupportedError: none of the known activations gives the same numbers.
    """
    points = [(gate, up) for gate in _GATES for up in (*_GATES, _FAR, -_FAR)]
    gate, up = (torch.tensor(values) for values in zip(*points, strict=True))
    wanted = evaluate(function, gate, up, gated, interleaved)
    for kind in candidates(function, module, gated, interleaved):
        given = torch.cat((gate[:, None], up[:, None]), dim=1) if gated else gate[:, None]
        if torch.allclose(inner(given, *kind)[:, 0], wanted, rtol=1e-5, atol=1e-6):
            return kind
    known = ", ".join(ACTIVATIONS)
    raise UnsupportedError(
        "its experts have an activation that is not known", where=type(module).__name__, hint=f"known: {known}"
    )


def candidates(
    function: Callable[[Tensor], Tensor], module: Any, gated: bool, interleaved: bool
) -> list[ExpertActivation]:
    """All known activations with slope, limit and shift as `function` shows them."""
    if not gated:
        return [ExpertActivation(name, False) for name in ACTIVATIONS]

    def at(gate: float, up: float) -> float:
        return float(evaluate(function, torch.tensor([gate]), torch.tensor([up]), True, interleaved)[0])

    rise = at(1.0, 0.5) - at(1.0, -0.5)  # activation(1)
    if not math.isfinite(rise) or rise == 0:
        return []
    shift = exact((at(1.0, 0.5) + at(1.0, -0.5)) / (2 * rise), module)
    reach = at(1.0, _FAR) / rise - shift
    limit = exact(reach, module) if reach < 0.99 * _FAR else None
    kinds = [ExpertActivation(name, True, 1.0, limit, shift) for name in ACTIVATIONS]
    if 0 < rise < 1:
        kinds.append(ExpertActivation("silu", True, exact(math.log(rise / (1 - rise)), module), limit, shift))
    return kinds


def evaluate(function: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, gated: bool, interleaved: bool) -> Tensor:
    """function of gate and up, each [N]. Two channels are given, so that a wrong layout shows."""
    if not gated:
        return function(gate)
    pairs = (gate, up, gate.flip(0), up.flip(0)) if interleaved else (gate, gate.flip(0), up, up.flip(0))
    return function(torch.stack(pairs, dim=-1))[:, 0]


def exact(value: float, module: Any) -> float:
    """Return the module's number that `value` is a rounded form of, else `value` to five digits."""
    numbers = [number for number in vars(module).values() if isinstance(number, int | float)]
    close = [float(number) for number in numbers if math.isclose(number, value, rel_tol=1e-4)]
    return close[0] if close else float(f"{value:.5g}") + 0.0
