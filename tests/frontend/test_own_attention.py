"""Attention that a model writes out is recognised by what it computes; whatever the op cannot represent is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from llmbuild.builder.frontend.contract import is_attention
from llmbuild.builder.frontend.own_attention import capture
from llmbuild.builder.frontend.plain_graph import plain_graph
from llmbuild.errors import UnsupportedError

HEADS, WIDTH, VOCAB = 4, 8, 32


class WrittenOut(nn.Module):
    """One layer: embedding, q, k, v, `attend`. A subclass decides how scores become weights."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed": nn.Embedding(VOCAB, HEADS * WIDTH),
                "q": nn.Linear(HEADS * WIDTH, HEADS * WIDTH),
                "kv": nn.Linear(HEADS * WIDTH, 2 * self.kv_heads * WIDTH),
            }
        )

    def forward(self, input_ids, position_ids, logits_indices):
        x = self.model["embed"](input_ids[None])
        q = self.model["q"](x).view(1, -1, HEADS, WIDTH).transpose(1, 2)
        k, v = self.model["kv"](x).view(1, x.shape[1], self.kv_heads, 2 * WIDTH).transpose(1, 2).split(WIDTH, -1)
        out = self.attend(q, k, v, position_ids)
        return out.transpose(1, 2).flatten(2)[0][logits_indices]

    def attend(self, q, k, v, position_ids):
        weights = functional.softmax(self.scores(q @ k.transpose(-1, -2), position_ids), dim=-1)
        return weights @ v

    def scores(self, products, position_ids):
        raise NotImplementedError


def future(products):
    ones = torch.ones(products.shape[-2:], dtype=torch.bool)
    return torch.triu(ones, 1)


class Causal(WrittenOut):
    def scores(self, products, position_ids):
        return (products * 0.25).masked_fill(future(products), float("-inf"))


class Window(WrittenOut):
    """By positions, not by indices, and with a mask that is added."""

    def scores(self, products, position_ids):
        ahead = position_ids[None, :] - position_ids[:, None]
        hidden = (ahead > 0) | (ahead <= -5)
        return products / math.sqrt(WIDTH) + hidden.float() * -1e9


class Alibi(WrittenOut):
    slopes = (0.5, 0.25, 0.125, 0.0625)

    def scores(self, products, position_ids):
        slopes = torch.tensor(self.slopes)[:, None, None]
        biased = products + slopes * torch.arange(products.shape[-1])
        return biased.masked_fill(future(products), torch.finfo(torch.float32).min)


class RoundedAlibi(Alibi):
    slopes = (0.7, 0.35, 0.21, 0.1)

    def scores(self, products, position_ids):
        slopes = torch.tensor(self.slopes).bfloat16()[:, None, None]
        biased = products + (slopes * torch.arange(products.shape[-1])).float()
        return biased.masked_fill(future(products), torch.finfo(torch.float32).min)


class Everything(WrittenOut):
    def scores(self, products, position_ids):
        return products


class Backwards(WrittenOut):
    def scores(self, products, position_ids):
        return products.masked_fill(torch.tril(torch.ones(products.shape[-2:], dtype=torch.bool), -4), -1e9)


class Dilated(WrittenOut):
    def scores(self, products, position_ids):
        ahead = position_ids[None, :] - position_ids[:, None]
        return products.masked_fill((ahead > 0) | (ahead % 2 == 1), -1e9)


class Quadratic(WrittenOut):
    def scores(self, products, position_ids):
        ahead = (position_ids[None, :] - position_ids[:, None]).float()
        return (products - 0.01 * ahead * ahead).masked_fill(future(products), -1e9)


class Squared(WrittenOut):
    def scores(self, products, position_ids):
        return (products * products).masked_fill(future(products), -1e9)


class LeakyMask(WrittenOut):
    """What is hidden gets a fixed score that is not low."""

    def scores(self, products, position_ids):
        return products.masked_fill(future(products), -3.0)


class LongerIsOther(WrittenOut):
    """A scale that depends on the length of the sequence."""

    def scores(self, products, position_ids):
        return (products / products.shape[-1]).masked_fill(future(products), -1e9)


class Sdpa(WrittenOut):
    kv_heads = 2

    def attend(self, q, k, v, position_ids):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class SdpaMask(WrittenOut):
    def attend(self, q, k, v, position_ids):
        mask = position_ids[None, :] <= position_ids[:, None]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)


class RepeatedBeforeRotation(WrittenOut):
    kv_heads = 2

    def attend(self, q, k, v, position_ids):
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, HEADS, -1, WIDTH) for x in (k, v))
        angles = position_ids[:, None].float() * torch.arange(1, 5)
        cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
        q, k = (x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin for x in (q, k))
        scores = (q @ k.transpose(-1, -2)).masked_fill(future(q @ k.transpose(-1, -2)), -1e9)
        return functional.softmax(scores, dim=-1) @ v


def attention_of(module: WrittenOut, **options):
    """Trace `module`, capture its attention and return (arguments of the op, what was captured, the graph)."""
    example = (
        torch.zeros(11, dtype=torch.int32),
        torch.zeros(11, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
    )
    with torch.no_grad():
        exported = torch.export.export(
            module.eval(), example, dynamic_shapes=({0: torch.export.Dim.AUTO},) * 3, strict=False
        )
    graph, _, literals = plain_graph(exported)
    captured = capture(graph, literals.__getitem__, **{"longest": 300, **options})
    (node,) = [node for node in graph.nodes if is_attention(node)]
    assert not any("softmax" in str(node.target) for node in graph.nodes)
    return node.args, captured, graph


@pytest.mark.parametrize(
    ("module", "scale", "window"),
    [(Causal, 0.25, None), (Window, WIDTH**-0.5, 5), (Sdpa, WIDTH**-0.5, None), (SdpaMask, 0.5, None)],
)
def test_scale_and_window_are_found(module, scale, window):
    args, captured, _ = attention_of(module())
    assert args[3] == 0 and args[4] == pytest.approx(scale) and args[5] == window
    assert args[8] is None and captured.count == 1 and captured.notices == []


def test_alibi_slopes_are_those_of_the_models_code():
    args, captured, graph = attention_of(Alibi())
    assert captured.slopes[args[8].name].tolist() == list(Alibi.slopes)
    assert args[8] in graph.nodes and captured.notices == []


def test_alibi_that_the_model_rounds_is_named_in_the_report():
    args, captured, _ = attention_of(RoundedAlibi())
    torch.testing.assert_close(captured.slopes[args[8].name], torch.tensor(RoundedAlibi.slopes).bfloat16().float())
    assert "rounds ALiBi to bfloat16" in captured.notices[0]


@pytest.mark.parametrize("module", [Sdpa, RepeatedBeforeRotation])
def test_repeated_heads_are_cached_once(module):
    args, _, _ = attention_of(module())
    q, k, v = (node.meta["val"].shape[1:] for node in args[:3])
    assert q == (HEADS, WIDTH) and k == v == (2, WIDTH)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Everything, "not causal"),
        (Backwards, "not causal"),
        (Dilated, "neither causal nor a causal window"),
        (LeakyMask, "not causal"),
        (Quadratic, "not a multiple of the distance"),
        (Squared, "not a multiple of q·kᵀ plus a bias"),
        (LongerIsOther, "differently for longer sequences"),
    ],
)
def test_what_the_op_cannot_represent_is_refused(module, message):
    with pytest.raises(UnsupportedError, match=message) as caught:
        attention_of(module())
    assert "test_own_attention.py" in str(caught.value)


def test_a_window_that_no_probed_sequence_reaches_is_not_taken_for_none():
    """The window of 5 would be invisible in sequences of 4 tokens: the config's window makes longer ones be tried."""
    args, _, _ = attention_of(Window(), windows=(5,), longest=64)
    assert args[5] == 5
