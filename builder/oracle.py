"""The oracle: executes the FX graph with torch on the CPU, node by node, at any stage of the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from llmbuild.builder.ir import Program
from llmbuild.plugins.attention_reference import PagedState, paged_state

if TYPE_CHECKING:
    from llmbuild.runtime.executor import StepInput


class Oracle:
    """Runs a program as it is now. Weights are loaded through their expressions, once, on first use.

    Args:
        program: At any stage: just traced, between two passes, or as a target gets it.
    """

    def __init__(self, program: Program) -> None:
        self.graph = program.graph
        self.expressions = dict(program.weights)
        self.weights: dict[str, Tensor] = {}
        self.last_use = last_uses(program.graph)

    def run(self, step: StepInput, state: PagedState) -> Tensor:
        """Run one step and return float32 logits [L, V]; the step's K and V are appended to `state`."""
        arrays = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in step._asdict().items()}
        state.set_step(*(arrays[name] for name in ("slot_mapping", "block_tables", "seq_lens", "cu_q_lens")))
        with paged_state(state), torch.inference_mode():
            return self.walk(arrays).float()

    def walk(self, inputs: dict[str, Tensor]) -> Tensor:
        """Execute all nodes; `inputs` by placeholder name. Values are freed after their last use."""
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = inputs[node.name] if node.name in inputs else self.weight(node.name)
            elif node.op == "output":
                result = values[node.args[0]]
                assert isinstance(result, Tensor)
                return result
            elif not is_assertion(node):
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            for dead in self.last_use.get(node, ()):
                values.pop(dead, None)
        raise AssertionError("the graph has no output")

    def weight(self, name: str) -> Tensor:
        if name not in self.weights:
            self.weights[name] = self.expressions[name].load()
        return self.weights[name]


def is_assertion(node: fx.Node) -> bool:
    """Whether `node` only checks what the trace assumed about sizes (that T >= 2, say)."""
    return "assert" in str(node.target) or "sym_constrain_range" in str(node.target)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, the values that nothing reads after it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for source in [node, *node.all_input_nodes]:
            if source not in seen:
                seen.add(source)
                found.setdefault(node, []).append(source)
    return found
