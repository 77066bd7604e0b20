"""Run programs on the oracle while somebody looks at, or replaces, the values of chosen nodes."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from llmbuild.builder.accuracy.windows import BLOCK_SIZE, WINDOW, Step
from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import is_assertion, last_uses
from llmbuild.plugins.attention_reference import PagedState, paged_state


class Weights:
    """A program's weights, loaded when a node reads them.

    Args:
        program: Whose weights.
        hold: Keep what was loaded. Else a weight lives until nothing more reads it in the walk.
        device: Where they go to.
    """

    def __init__(self, program: Program, *, hold: bool, device: torch.device) -> None:
        self._expressions = dict(program.weights)
        self._hold, self._device = hold, device
        self._held: dict[str, Tensor] = {}

    def load(self, name: str) -> Tensor:
        if name in self._held:
            return self._held[name]
        value = self._expressions[name].load().to(self._device)
        if self._hold:
            self._held[name] = value
        return value


class Runner:
    """One program and its weights.

    Args:
        program: At any stage, but from now on unchanged.
        hold: As in `Weights`.
        device: Where it runs.
    """

    def __init__(self, program: Program, *, hold: bool, device: str = "cpu") -> None:
        self.program = program
        self.device = torch.device(device)
        self.weights = Weights(program, hold=hold, device=self.device)
        self._last_use = last_uses(program.graph)
        self._state = self.new_state()

    @staticmethod
    def new_state() -> PagedState:
        """Return a KV cache for one window."""
        return PagedState(-(-WINDOW // BLOCK_SIZE), BLOCK_SIZE)

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        """Return float32 logits [L, V]. Steps of a window come in order; a new window overwrites the one before."""
        return self.logits(step).cpu().numpy()

    def logits(self, step: Step) -> Tensor:
        """Return what `forward` does, as a tensor on the runner's device."""
        walk = Walk(self, step, self._state, {})
        assert walk.next() is None
        return walk.logits.float()

    def array(self, values: np.ndarray) -> Tensor:
        """Return an array as a tensor on the runner's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def values(self, step: Step, watched: Mapping[fx.Node, Any], state: PagedState) -> Generator[Any, Any, Tensor]:
        """Execute all nodes. Yields (what `watched` says of a node, its value); goes on with the value sent, if any."""
        inputs = step._asdict()
        values: dict[fx.Node, Any] = {}

        def value_of(node: fx.Node) -> Any:
            if node not in values:  # a weight, which waits until it is read
                values[node] = self.weights.load(node.name)
            return values[node]

        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                if node.name in inputs:
                    values[node] = self.array(inputs[node.name])
                continue
            if node.op == "output":
                return value_of(node.args[0])
            if not is_assertion(node):
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
                values[node] = node.target(*args, **kwargs)
                if node in watched:
                    replacement = yield watched[node], values[node]
                    if replacement is not None:
                        values[node] = replacement
            for dead in self._last_use.get(node, ()):
                values.pop(dead, None)
        raise AssertionError("the graph has no output")


class Walk:
    """One run of a program that stops at each watched node. Several may be under way at once, each over its own cache.

    Args:
        runner: What runs.
        step: Its input.
        state: Its KV cache.
        watched: Where to stop, and what to call it.
    """

    def __init__(self, runner: Runner, step: Step, state: PagedState, watched: Mapping[fx.Node, Any]) -> None:
        arrays = {name: runner.array(value) for name, value in step._asdict().items()}
        state.set_step(*(arrays[name] for name in ("slot_mapping", "block_tables", "seq_lens", "cu_q_lens")))
        self._values = runner.values(step, watched, state)
        self._state = state
        self.logits: Tensor

    def next(self, replacement: Tensor | None = None) -> tuple[Any, Tensor] | None:
        """Run to the next watched node; None at the end, when `logits` [L, V] are there.

        Args:
            replacement: Takes the place of the value where the walk stands.
        """
        with paged_state(self._state), torch.inference_mode():
            try:
                found: tuple[Any, Tensor] = self._values.send(replacement)
                return found
            except StopIteration as end:
                self.logits = end.value
                return None


def copy_program(program: Program) -> Program:
    """Return a program that passes over `program` leave as it is. Weights are expressions and shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if copies[node].name != node.name:
            raise AssertionError(f"{node.name} became {copies[node].name} in the copy")
    return Program(graph, dict(program.weights), program.info, program.kv_layers, dict(program.tokenizer_files))
