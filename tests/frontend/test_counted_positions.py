"""Positions that a model counts itself become `position_ids`; other counts stay."""

from __future__ import annotations

import torch

from llmbuild.builder.frontend.counted_positions import use_position_ids
from llmbuild.builder.frontend.plain_graph import plain_graph


class Model(torch.nn.Module):
    def __init__(self, start: int, step: int) -> None:
        super().__init__()
        self.start, self.step = start, step

    def forward(self, input_ids, position_ids, logits_indices):
        end = self.start + self.step * input_ids.shape[0]
        return input_ids * torch.arange(self.start, end, self.step)


def traced(start: int, step: int) -> torch.fx.Graph:
    example = tuple(torch.zeros(size, dtype=torch.int32) for size in (11, 11, 3))
    exported = torch.export.export(
        Model(start, step), example, dynamic_shapes=({0: torch.export.Dim.AUTO},) * 3, strict=False
    )
    return plain_graph(exported)[0]


def counters(graph: torch.fx.Graph) -> int:
    return sum("arange" in str(node.target) for node in graph.nodes)


def test_a_count_of_all_tokens_is_the_positions() -> None:
    graph = traced(0, 1)
    assert (counters(graph), use_position_ids(graph), counters(graph)) == (1, 1, 0)
    ids, positions = torch.tensor([3, 5, 7], dtype=torch.int32), torch.tensor([0, 1, 0], dtype=torch.int32)
    result = torch.fx.GraphModule({}, graph)(ids, positions, torch.tensor([2], dtype=torch.int32))
    assert result.tolist() == [0, 5, 0] and result.dtype == torch.int64


def test_other_counts_stay() -> None:
    for start, step in ((1, 1), (0, 2)):
        graph = traced(start, step)
        assert (use_position_ids(graph), counters(graph)) == (0, 1)
