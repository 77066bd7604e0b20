"""Runs a launch plan on the CPU: kernels in Triton's interpreter, products of the GEMM library with torch.

The obvious executor of a plan, for tiny models. Memory of the arena is filled with NaN before a step and behind each
buffer's last use, so that a value that is read too early, too late or from the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmbuild.engine.expressions import evaluate
from llmbuild.engine.launch_plan import GemmOp, KernelOp, Number, Place
from llmbuild.plugins.kernels.interpreter import interpret

if TYPE_CHECKING:
    from llmbuild.builder.targets.cuda.lowering import Planned
    from llmbuild.runtime.executor import StepInput

NAN = 0xFF  # as every byte of a float: NaN; of an integer: -1


class PlanInterpreter:
    """Runs the steps of a plan.

    Args:
        planned: The plan with its kernels and weights.
        num_blocks: Blocks of the KV pools.
        weights: By the plan's names, those of an engine; None: they are computed from the model.
    """

    def __init__(self, planned: Planned, num_blocks: int, weights: Mapping[str, Tensor] | None = None) -> None:
        self.plan = planned.plan
        self.num_blocks, self.block_size = num_blocks, planned.plan.limits.block_size
        self.kernels = {
            name: (interpret((spec.interpreted or spec).function), spec) for name, spec in planned.specs.items()
        }
        if weights is None:
            weights = {name: expression.load() for name, expression in planned.weights.items()}
        self.weights = {name: weights[name].flatten() for name in planned.weights}
        slots = num_blocks * self.block_size
        self.pools = {
            pool.name: torch.zeros(slots * pool.width, dtype=getattr(torch, pool.dtype)) for pool in self.plan.pools
        }
        self.arena = torch.empty(self.plan.arena_bytes, dtype=torch.uint8)
        self.buffers = {buffer.name: buffer for buffer in self.plan.buffers}
        self.counters = {
            counter.name: torch.zeros(counter.num_bytes // 4, dtype=torch.int32) for counter in self.plan.counters
        }
        self.inputs: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}

    def forward(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Run one step; return float32 logits [L, V]."""
        self.start(step)
        kind = "decode" if self.sizes["T"] == self.sizes["B"] else "mixed"
        for number, op in enumerate(self.plan.ops):
            if op.when in ("always", kind):
                self.run(op)
            self.forget(number)
        rows, columns = self.sizes["L"], self.plan.logits_columns
        logits = self.tensor(self.plan.logits)[: rows * columns].view(rows, columns)
        result: npt.NDArray[np.float32] = logits.float().numpy().copy()
        return result

    def close(self) -> None:
        del self.arena, self.pools, self.weights

    def start(self, step: StepInput) -> None:
        """Lay out a step's arrays as the plan's inputs."""
        stride = self.plan.limits.table_stride
        tables = np.zeros((len(step.seq_lens), stride), np.int32)
        tables[:, : step.block_tables.shape[1]] = step.block_tables
        arrays = {**step._asdict(), "block_tables": tables}
        self.sizes = {"T": len(step.input_ids), "B": len(step.seq_lens), "L": len(step.logits_indices)}
        for given in self.plan.inputs:
            array = np.ascontiguousarray(arrays[given.name]).reshape(-1)
            if len(array) != evaluate(given.size, self.sizes):
                raise ValueError(f"{given.name} has {len(array)} elements in a step of {self.sizes}")
            self.inputs[given.name] = torch.from_numpy(array.copy())
        self.arena.fill_(NAN)

    def run(self, op: KernelOp | GemmOp) -> None:
        if isinstance(op, KernelOp):
            self.launch(op)
            return
        rows = evaluate(op.rows, self.sizes)
        launches = op.kernels_for(rows)
        if launches is None:
            self.product(op, rows)
        else:
            for launch in launches:
                self.launch(launch)

    def launch(self, op: KernelOp) -> None:
        kernel, spec = self.kernels[op.kernel]
        interpreted = spec.interpreted or spec
        grid = [evaluate(text, self.sizes) for text in interpreted.grid]
        if 0 in grid:
            return
        values: dict[str, Any] = dict(interpreted.constants)
        for name, argument in zip(spec.signature, op.arguments, strict=True):
            if name not in interpreted.signature:
                continue
            if isinstance(argument, Number):
                values[name] = evaluate(argument.value, self.sizes)
                continue
            values[name] = self.tensor(argument)
            if spec.signature[name] == "*fp8e4nv":  # a pool holds the bits of these
                values[name] = values[name].view(torch.float8_e4m3fn)
        kernel[grid](**values)
        for argument in op.arguments:
            if isinstance(argument, Place) and argument.kind == "counter" and self.counters[argument.name].any():
                raise AssertionError(f"{op.kernel} does not leave {argument.name} zero")

    def product(self, op: GemmOp, rows: int) -> None:
        x = self.tensor(op.x).as_strided((op.batch, rows, op.k), (op.x_batch, op.x_stride, 1))
        down, right = (op.weight_stride, 1) if op.weight_layout == "nk" else (1, op.weight_stride)
        weight = self.tensor(op.weight).as_strided((op.batch, op.n, op.k), (op.weight_batch, down, right))
        result = x.float() @ weight.float().transpose(1, 2)
        if op.x_scale is not None and op.weight_scale is not None:
            result = result * self.tensor(op.x_scale)[:rows, None] * self.tensor(op.weight_scale)[: op.n]
        if op.bias is not None:
            result = result + self.tensor(op.bias).float()
        out = self.tensor(op.out).as_strided((op.batch, rows, op.n), (op.out_batch, op.out_stride, 1))
        out.copy_(result)

    def tensor(self, place: Place) -> Tensor:
        """Return what lies at a place, as one row, to the end of what holds it."""
        if place.kind == "buffer":
            buffer = self.buffers[place.name]
            size = evaluate(buffer.size, self.sizes)
            held = self.arena[buffer.offset : buffer.offset + size].view(getattr(torch, buffer.dtype))
        else:
            kinds = {"input": self.inputs, "weight": self.weights, "pool": self.pools, "counter": self.counters}
            held = kinds[place.kind][place.name]
        return held[place.offset // held.element_size() :]

    def forget(self, number: int) -> None:
        """Spoil the memory of buffers that op `number` was the last to touch."""
        for buffer in self.plan.buffers:
            if buffer.last == number:
                self.arena[buffer.offset : buffer.offset + evaluate(buffer.size, self.sizes)] = NAN
