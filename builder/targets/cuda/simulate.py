"""Runs a partitioned program on the CPU: barriers with torch, row programs in Triton's interpreter.

The obvious executor: every buffer has memory of its own, filled with NaN until it is written, so that a value read
too early or left out shows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from llmbuild.builder.ir import INPUT_NAMES, Program
from llmbuild.builder.targets.cuda.buffers import SLOTS, Buffer, View
from llmbuild.builder.targets.cuda.kernel_source import functions
from llmbuild.builder.targets.cuda.levels import Rows, computed_operands
from llmbuild.builder.targets.cuda.partition import Barrier, Launch, partition
from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.attention_reference import PagedState, paged_state
from llmbuild.plugins.kernels.interpreter import interpret

if TYPE_CHECKING:
    from llmbuild.runtime.executor import StepInput


class Simulator:
    """Runs `program`, which must have been optimised, part after part. Weights are loaded once, on first use."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parts = partition(program)
        self.kernels = functions(self.parts.source, tuple(kernel.name for kernel in self.parts.kernels))
        self.symbols = Rows(program).of_symbol
        self.weights: dict[str, Tensor] = {}

    def run(self, step: StepInput, state: PagedState) -> Tensor:
        """Run one step and return float32 logits [L, V]; the step's K and V are appended to `state`."""
        arrays = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in step._asdict().items()}
        state.set_step(*(arrays[name] for name in ("slot_mapping", "block_tables", "seq_lens", "cu_q_lens")))
        memory = Memory(self, {name: arrays[name] for name in (*INPUT_NAMES, "slot_mapping")}, state)
        with paged_state(state), torch.inference_mode():
            for part in self.parts.parts:
                if isinstance(part, Launch):
                    grid = [evaluate(text, memory.counts) for text in part.kernel.grid]
                    self.launch(part, grid, memory)
                else:
                    self.compute(part, memory)
            return memory.view(self.parts.output).float().clone()

    def launch(self, part: Launch, grid: list[int], memory: Memory) -> None:
        interpret(self.kernels[part.kernel.name])[grid](*(memory.tensor(name) for name in part.arguments))

    def compute(self, part: Barrier, memory: Memory) -> None:
        """Run a barrier as the torch op that it is."""
        values = dict(zip(computed_operands(part.node), map(memory.view, part.inputs), strict=True))

        def operand(node: fx.Node) -> Tensor:
            return values[node] if node in values else memory.tensor(node.name)

        args, kwargs = fx.node.map_arg((part.node.args, dict(part.node.kwargs)), operand)
        target: Any = part.node.target
        memory.store(self.parts.buffers[part.node.name], target(*args, **kwargs))

    def weight(self, name: str) -> Tensor:
        if name not in self.weights:
            self.weights[name] = self.program.weights[name].load()
        return self.weights[name]


class Memory:
    """The buffers of one step. counts: T and L."""

    def __init__(self, simulator: Simulator, inputs: dict[str, Tensor], state: PagedState) -> None:
        self.simulator, self.state = simulator, state
        self.tensors = dict(inputs)
        self.counts = {"T": len(inputs["input_ids"]), "L": len(inputs["logits_indices"])}

    def tensor(self, name: str) -> Tensor:
        """Return the memory of a buffer: rows below each other."""
        if name not in self.tensors:
            buffer = self.simulator.parts.buffers[name]
            if buffer.rows is None:
                return self.simulator.weight(name)
            if buffer.rows == SLOTS:
                return self.pool(buffer)
            self.tensors[name] = torch.full(
                (self.counts[buffer.rows], buffer.width),
                math.nan if buffer.dtype.is_floating_point else 0,
                dtype=buffer.dtype,
            )
        return self.tensors[name]

    def pool(self, buffer: Buffer) -> Tensor:
        """Return a layer's keys or values: "keys_3" are `state.keys[3]`, [slots, heads, channels]."""
        kind, layer = buffer.name.split("_")
        pools: dict[int, Tensor] = getattr(self.state, kind)
        if int(layer) not in pools:
            slots = self.state.num_blocks * self.state.block_size
            pools[int(layer)] = torch.zeros(slots, *buffer.shape[1:], dtype=buffer.dtype)
        return pools[int(layer)]

    def store(self, buffer: Buffer, value: Tensor) -> None:
        assert buffer.row_axis is not None
        self.tensors[buffer.name] = value.movedim(buffer.row_axis, 0).contiguous()

    def view(self, view: View) -> Tensor:
        if self.simulator.parts.buffers[view.buffer].rows == SLOTS:
            return self.tensor(view.buffer)[self.tensors["slot_mapping"].long()]  # what attention would append
        memory = self.tensor(view.buffer).reshape(-1)
        return torch.as_strided(memory, [self.count(dim) for dim in view.shape], view.strides, view.offset)

    def count(self, dim: Any) -> int:
        if isinstance(dim, int):
            return dim
        return int(dim.subs({symbol: self.counts[rows] for symbol, rows in self.simulator.symbols.items()}))
