"""CUDA graphs of decode steps: one for each bucket of batch sizes, captured behind its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmbuild.runtime.executors.cuda.driver import Device, capture
from llmbuild.runtime.executors.cuda.step_program import KernelStep, StepProgram, StepSizes


class DecodeGraphs:
    """Runs decode steps of `batch` sequences, a bucket.

    The first step of a bucket runs op by op, which loads what the driver and cuBLASLt load lazily, and is captured
    behind it: nothing of that may happen during a capture.

    Args:
        head: What runs before the plan's ops.
        tails: What may run behind them, by name: each has graphs of its own.
        longest: The longest sequence that a step may hold; graphs are captured for it.
    """

    def __init__(
        self,
        device: Device,
        program: StepProgram,
        head: Sequence[KernelStep],
        tails: Mapping[str, Sequence[KernelStep]],
        *,
        longest: int,
    ) -> None:
        self._device = device
        self._program = program
        self._head = head
        self._tails = tails
        self._longest = longest
        self._graphs: dict[tuple[int, str], Any] = {}

    @property
    def captured(self) -> tuple[int, ...]:
        """The buckets that have a graph."""
        return tuple(sorted({batch for batch, _ in self._graphs}))

    def run(self, batch: int, tail: str, stream: Any) -> None:
        """Put one step into the stream; its inputs are on the GPU, or on their way in this stream."""
        graph = self._graphs.get((batch, tail))
        if graph is not None:
            self._device.launch_graph(graph, stream)
            return
        sizes = StepSizes(tokens=batch, sequences=batch, rows=batch, longest=self._longest)
        self._program.prepare("decode", sizes, stream)
        self._put(sizes, tail, stream)
        self._graphs[batch, tail] = capture(self._device, stream, lambda: self._put(sizes, tail, stream))

    def close(self) -> None:
        for graph in self._graphs.values():
            self._device.free_graph(graph)
        self._graphs.clear()

    def _put(self, sizes: StepSizes, tail: str, stream: Any) -> None:
        for step in self._head:
            step.run(sizes, stream)
        self._program.run("decode", sizes, stream)
        for step in self._tails[tail]:
            step.run(sizes, stream)
