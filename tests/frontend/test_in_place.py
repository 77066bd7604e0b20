"""In-place ops become functional without a second trace, where nothing else sees the memory they write to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from llmbuild.builder.frontend.in_place import is_composite_view, make_functional, mutates


def divided(x: Tensor) -> Tensor:
    best, _ = torch.topk(x, 2)
    best /= best.sum(-1, keepdim=True)
    return best


def marked(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x)
    before = mask + 1
    mask.scatter_(1, x.argmax(-1, keepdim=True), 1)  # its result is not used, its effect is
    return before * 10 + mask


def chained(x: Tensor) -> Tensor:
    y = x * 2
    z = y.mul_(3).add_(1)
    return y + z.sub_(2) + y


def viewed_afterwards(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(2)
    return y.view(-1)


def view_of_input(x: Tensor) -> Tensor:
    y = x.clone().view(-1)
    y.mul_(2)
    return y


def seen_through_a_view(x: Tensor) -> Tensor:
    y = x + 1
    first = y[0]
    y.mul_(2)
    return first


def seen_through_a_view_of_a_chain(x: Tensor) -> Tensor:
    y = x + 1
    z = y.mul_(2)
    first = z[0]
    y.add_(1)
    return first


def other_dtype(x: Tensor) -> Tensor:
    y = torch.ones(x.shape, dtype=torch.float32)
    y.mul_(x.double().sum(-1, keepdim=True))
    return y


def export(function):
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.export.export(Module(), (x,), strict=False), x, function(x.clone())


@pytest.mark.parametrize("function", [divided, marked, chained, viewed_afterwards], ids=lambda f: f.__name__)
def test_rewritten(function):
    exported, x, expected = export(function)
    assert any(mutates(node) for node in exported.graph.nodes)
    assert make_functional(exported.graph)
    exported.graph.lint()
    assert not any(mutates(node) for node in exported.graph.nodes)
    exported.graph_module.recompile()
    assert torch.equal(exported.graph_module(x)[0], expected)


@pytest.mark.parametrize(
    "function",
    [view_of_input, seen_through_a_view, seen_through_a_view_of_a_chain, other_dtype],
    ids=lambda f: f.__name__,
)
def test_left_to_torch(function):
    """Nothing is changed then, and torch's own rewriting still gives the right result."""
    exported, x, expected = export(function)
    before = [node.target for node in exported.graph.nodes]
    assert not make_functional(exported.graph)
    assert [node.target for node in exported.graph.nodes] == before
    assert torch.equal(exported.run_decompositions({}).module()(x), expected)


@pytest.mark.parametrize(
    ("function", "composite"),
    [
        (lambda x: (x * 2).T + 0.0, True),
        (lambda x: (x * 2).broadcast_to(2, 3, 4) + 0.0, True),
        (lambda x: (x * 2).transpose(0, 1) + 0.0, False),
        (lambda x: torch.nn.functional.linear(x, x), False),
    ],
)
def test_views_that_torch_defines_by_others(function, composite):
    exported, _, _ = export(function)
    assert any(is_composite_view(node) for node in exported.graph.nodes) == composite
