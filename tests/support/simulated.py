"""Small graphs and programs through the cuda target's partition, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from llmbuild.builder.ir import Program
from llmbuild.builder.passes.edit import propagate
from support.plans import tiny_executor
from support.small_programs import small_step


def simulated(program: Program) -> Tensor:
    """`support.small_programs.result` of the planned program."""
    rows = torch.from_numpy(tiny_executor(program, num_blocks=4).forward(small_step()))
    shape = next(node for node in program.graph.nodes if node.op == "output").args[0].meta["val"].shape
    return rows.unflatten(1, [int(dim) for dim in shape[1:]])


class Tracer:
    """A graph over one input [T, ...] whose rows are symbolic, made call by call."""

    def __init__(self, *shape: int) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.input = self.graph.placeholder("x")
        sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * len(shape)
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        self.input.meta["val"] = self.mode.from_tensor(torch.zeros(11, *shape), symbolic_context=context)

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        if target.__name__ == "getitem":
            node.meta["val"] = args[0].meta["val"][args[1]]
        else:
            node.meta["val"] = propagate(node, self.mode)
        return node

    def run(self, result: fx.Node, x: Tensor) -> Tensor:
        """The graph by torch."""
        values: dict[fx.Node, Any] = {self.input: x}
        for node in self.graph.nodes:
            if node.op == "call_function":
                values[node] = node.target(*fx.node.map_arg(node.args, values.__getitem__))
        return values[result]
