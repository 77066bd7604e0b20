"""Which activation lies between an expert's linears, found from what the module's code computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from llmbuild.builder.frontend.expert_activation import ExpertActivation, identify
from llmbuild.errors import UnsupportedError
from llmbuild.plugins.ops import ACTIVATIONS, activate


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_plain_activations(name: str, gated: bool):
    def gate(x):
        left, right = x.chunk(2, dim=-1)
        return activate(left, name) * right

    found = identify(gate if gated else lambda x: activate(x, name), SimpleNamespace(), gated=gated, interleaved=False)
    assert found == ExpertActivation(name, gated)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("slope", [1.0, 1.702])
def test_clamped_gates(interleaved: bool, shift: float, slope: float):
    module = SimpleNamespace(alpha=slope, swiglu_limit=7.0, unrelated=3)

    def gate(x):
        left, right = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        left, right = left.clamp(max=7.0), right.clamp(-7.0, 7.0)
        return left * torch.sigmoid(left * slope) * (right + shift)

    assert identify(gate, module, gated=True, interleaved=interleaved) == ExpertActivation(
        "silu", True, slope, 7.0, shift
    )


def test_the_wrong_layout_is_not_taken_for_the_right_one():
    def gate(x):
        return torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2]

    with pytest.raises(UnsupportedError, match="its experts have an activation that is not known"):
        identify(gate, SimpleNamespace(), gated=True, interleaved=False)


@pytest.mark.parametrize(
    "function",
    [lambda gate, up: torch.tanh(gate) * up, lambda gate, up: gate.relu() * up.tanh(), lambda gate, up: up * 0],
    ids=["tanh", "bent up", "zero"],
)
def test_other_gates_are_refused_by_name(function):
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        identify(lambda x: function(*x.chunk(2, dim=-1)), SimpleNamespace(), gated=True, interleaved=False)
