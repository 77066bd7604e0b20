"""Programs made from a few lines of torch, for tests of single passes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from llmbuild.builder.frontend.plain_graph import plain_graph
from llmbuild.builder.ir import Constant, LayerKV, ModelInfo, Program
from llmbuild.builder.oracle import Oracle
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.runtime.executor import StepInput

CHANNELS, VOCAB, TOKENS = 16, 32, 6

Body = Callable[..., Tensor]


class _Model(nn.Module):
    def __init__(self, body: Body, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        table = torch.randn(VOCAB, CHANNELS, generator=generator)
        self.table = nn.Parameter(table.to(dtype), requires_grad=False)
        self.body = body
        self.names = tuple(weights)
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_indices: Tensor) -> Tensor:
        x = nn.functional.embedding(input_ids, self.table)
        out = self.body(x, position_ids, *(getattr(self, name) for name in self.names))
        return out[logits_indices]


def small_program(
    body: Body, *, dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB, **weights: Tensor
) -> Program:
    """Trace `body(x [T, 16], position_ids [T], *weights) -> [T, ...]`; its rows asked for are the program's result."""
    sizes = (11, 11, 3)
    example = tuple(torch.zeros(size, dtype=torch.int32) for size in sizes)
    dynamic = ({0: torch.export.Dim.AUTO},) * 3
    model = _Model(body, weights, dtype)
    with torch.no_grad():
        exported = torch.export.export(model, example, dynamic_shapes=dynamic, strict=False)
    graph, names, literals = plain_graph(exported)
    values = {placeholder: getattr(model, name).detach() for placeholder, name in names.items()} | literals
    info = ModelInfo("small", "Small", vocab_size, CHANNELS, 1, 64, None, (2,), None, "huggingface", ())
    weights_of = {name: Constant(value) for name, value in values.items()}
    return Program(graph, dict(weights_of), info, (LayerKV(1, CHANNELS, CHANNELS, None),))


def small_step() -> StepInput:
    """Six tokens at positions 3..8, of which the rows 5, 0 and 2 are wanted."""
    tokens = np.arange(TOKENS, dtype=np.int32)
    return StepInput(
        input_ids=(tokens * 5 + 3) % VOCAB,
        position_ids=tokens + 3,
        slot_mapping=tokens,
        block_tables=np.zeros((1, 1), np.int32),
        seq_lens=np.array([TOKENS], np.int32),
        cu_q_lens=np.array([0, TOKENS], np.int32),
        logits_indices=np.array([5, 0, 2], np.int32),
    )


def result(program: Program) -> Tensor:
    """Run `small_step` and return the rows that it wants."""
    return Oracle(program).run(small_step(), PagedState(num_blocks=4, block_size=8))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def targets(program: Program) -> list[str]:
    """Names of the ops called, in order, without getitems: ["aten.linear.default", ...]."""
    return [
        str(node.target)
        for node in program.graph.nodes
        if node.op == "call_function" and "getitem" not in str(node.target)
    ]


def count(program: Program, op: str) -> int:
    """How many calls of `op` ("rope", "linear") there are."""
    return sum(name.split(".")[1] == op for name in targets(program))
