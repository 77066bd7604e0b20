"""Ops that let tokens see each other outside attention are found, and harmless ones are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llmbuild.builder.frontend.contract import check_tokens_stay_apart
from llmbuild.builder.frontend.plain_graph import plain_graph
from llmbuild.errors import UnsupportedError

MIXING = {
    "convolution": lambda x, i: nn.functional.conv1d(x.transpose(1, 2), torch.ones(4, 4, 3), padding=1).transpose(1, 2),
    "running sum": lambda x, i: x.cumsum(1),
    "mean over tokens": lambda x, i: x - x.mean(1, keepdim=True),
    "mean over all": lambda x, i: x - x.mean(),
    "softmax over tokens": lambda x, i: x.softmax(1),
    "token shift": lambda x, i: torch.cat((x[:, :1], x[:, :-1]), 1),
    "roll": lambda x, i: x.roll(1, 1),
    "flip": lambda x, i: x.flip(1),
    "first token": lambda x, i: x + x[:, 0:1],
    "attention by hand": lambda x, i: (x @ x.transpose(1, 2)) @ x,
    "einsum": lambda x, i: torch.einsum("bti,btj->bij", x, x)[:, :1] + x,
    "counted positions": lambda x, i: x + torch.arange(x.shape[1])[None, :, None],
    "pad": lambda x, i: nn.functional.pad(x, (0, 0, 1, 0))[:, :-1],
}
HARMLESS = {
    "softmax over channels": lambda x, i: x.softmax(-1),
    "norm": lambda x, i: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "layer norm": lambda x, i: nn.functional.layer_norm(x, (4,)),
    "channel slices": lambda x, i: torch.cat((-x[..., 2:], x[..., :2]), -1),
    "running sum of channels": lambda x, i: x.cumsum(-1),
    "heads and back": lambda x, i: x.view(1, -1, 2, 2).transpose(1, 2).transpose(1, 2).reshape(1, -1, 4),
    "outer product with frequencies": lambda x, i: x @ torch.ones(4, 4),
    "top-k of channels": lambda x, i: x.topk(4, -1)[0],
    "einsum over channels": lambda x, i: torch.einsum("bti,ij->btj", x, torch.ones(4, 4)),
}


class Row(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, input_ids, position_ids, logits_indices):
        x = (input_ids + position_ids)[None, :, None].float() * torch.ones(4)
        return self.function(x, logits_indices)[0, logits_indices]


def graph_of(module):
    example = tuple(torch.zeros(size, dtype=torch.int32) for size in (11, 11, 3))
    dynamic = ({0: torch.export.Dim.AUTO},) * 3
    return plain_graph(torch.export.export(module, example, dynamic_shapes=dynamic, strict=False))[0]


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused_with_its_source_line(name):
    with pytest.raises(UnsupportedError, match="besides attention mix tokens") as caught:
        check_tokens_stay_apart(graph_of(Row(MIXING[name])))
    assert "test_token_axis.py:" in str(caught.value)


@pytest.mark.parametrize("name", HARMLESS)
def test_row_programs_pass(name):
    check_tokens_stay_apart(graph_of(Row(HARMLESS[name])))


class NoPositions(nn.Module):
    def forward(self, input_ids, position_ids, logits_indices):
        return input_ids[logits_indices, None].float()


class FixedSize(nn.Module):
    def forward(self, input_ids, position_ids, logits_indices):
        return (input_ids + position_ids).view(11)[logits_indices, None].float()


def test_model_that_ignores_positions_is_refused():
    with pytest.raises(UnsupportedError, match="does not use position_ids"):
        check_tokens_stay_apart(graph_of(NoPositions()))


def test_fixed_token_count_is_refused():
    with pytest.raises(UnsupportedError, match="the number of tokens was fixed to 11"):
        check_tokens_stay_apart(graph_of(FixedSize()))
