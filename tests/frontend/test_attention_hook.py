"""The attention function refuses what the paged op cannot represent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llmbuild.builder.frontend.attention_hook import attention
from llmbuild.errors import UnsupportedError
from llmbuild.plugins.attention_reference import PagedState, paged_state

T, HEADS, KV_HEADS, WIDTH = 5, 4, 2, 8


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, T, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


class Recorded(PagedState):
    """A paged state that keeps the arguments it was called with."""

    def attend(self, q, k, v, layer, scale, **options):
        self.seen = SimpleNamespace(q=q, layer=layer, scale=scale, **options)
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


def call(module=None, mask=None, query=None, **kwargs):
    module = module or module_with(layer_idx=3)
    q, k, v = tensors()
    with paged_state(Recorded(1, 8)) as state:
        out, weights = attention(module, q if query is None else query, k, v, mask, **kwargs)
    assert weights is None and out.shape == (1, T, HEADS, WIDTH)
    return state.seen


def module_with(**attributes):
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_heads_become_token_major_and_options_pass():
    sinks = torch.ones(HEADS)
    seen = call(scaling=0.5, softcap=2.0, sliding_window=6, s_aux=sinks, dropout=0.0, position_ids=torch.zeros(1, T))
    assert torch.equal(seen.q, tensors()[0][0].transpose(0, 1))
    assert (seen.layer, seen.scale, seen.window, seen.softcap) == (3, 0.5, 6, 2.0) and seen.sinks is sinks


def test_defaults():
    seen = call()
    assert (seen.scale, seen.window, seen.softcap, seen.sinks) == (WIDTH**-0.5, None, None, None)


def test_window_of_the_module_counts_unless_the_call_says_otherwise():
    module = module_with(layer_idx=0, sliding_window=6)
    assert call(module).window == 6
    assert call(module, sliding_window=None).window is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mask=torch.zeros(1, 1, T, T)), "builds its own attention mask"),
        (dict(is_causal=False), "attention is not causal"),
        (dict(module=module_with(layer_idx=0, is_causal=False)), "attention is not causal"),
        (dict(position_bias=torch.zeros(1)), "arguments that are not supported: position_bias"),
        (dict(query=torch.zeros(1, HEADS, 2, WIDTH)), "cross-attention"),
        (dict(module=nn.Linear(1, 1)), "does not know its layer index"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(UnsupportedError, match=message):
        call(**arguments)
