"""CUDA graphs of decode steps: one for each context, captured behind the first step that runs in it.

    first step of a batch size     run | capture, which runs nothing
    later steps                    launch the graph: neither TensorRT nor the plugin's Python is asked again

TensorRT wants one ordinary run after shapes have changed, and a context that stays as it is as long as its graph is
used. So each batch size has a context of its own, and a step is padded to one of those sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmbuild.cuda.calls import CudaError
from llmbuild.errors import LLMBuildError
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.cuda.driver import Device, capture


class StepGraphs:
    """problem: why nothing is captured any more, or None. Steps then run as they would without graphs."""

    def __init__(self, device: Device, session: Any, stream: Any) -> None:
        self._device, self._session, self._stream = device, session, stream
        self._graphs: dict[int, Any] = {}
        self.problem: str | None = None

    @property
    def captured(self) -> tuple[int, ...]:
        """The contexts that have a graph."""
        return tuple(sorted(self._graphs))

    def run(self, context: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Put a step into the stream, whose shapes and addresses are the same whenever the context is.

        Warns:
            RuntimeWarning: Once, if a step cannot be captured. It has run by then.

        Raises:
            LLMBuildError: TensorRT refuses to run it.
        """
        graph = self._graphs.get(context)
        if graph is not None:
            self._device.launch_graph(graph, self._stream)
            return
        self._session.run(context, shapes, addresses)
        if self.problem is None:
            self._capture(context)

    def _capture(self, context: int) -> None:
        """Capture what the context ran last, or give up."""
        try:
            self._graphs[context] = capture(self._device, self._stream, lambda: self._session.run_again(context))
        except CudaError as error:  # the driver ends a capture in which something was done that cannot be captured
            self._give_up(f"{error.what}; TensorRT: {self._session.reason()}")
        except LLMBuildError as error:
            self._give_up(error.what)

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        warnings.warn(
            f"decode steps run without CUDA graphs, slower, as one cannot be captured: {problem}",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        for graph in self._graphs.values():
            self._device.free_graph(graph)
        self._graphs.clear()


def padded(step: StepInput, batch: int, *, block: int, block_size: int) -> StepInput:
    """Return a decode step of `batch` sequences and as many rows of logits.

    Args:
        step: Of one token a sequence.
        block: Where padding rows have their only token, with id 0; no sequence owns it.
    """
    more = batch - len(step.seq_lens)
    tables = np.zeros((more, step.block_tables.shape[1]), np.int32)
    tables[:, 0] = block
    counting = np.arange(batch + 1, dtype=np.int32)
    return StepInput(
        input_ids=np.pad(step.input_ids, (0, more)),
        position_ids=np.pad(step.position_ids, (0, more)),
        slot_mapping=np.pad(step.slot_mapping, (0, more), constant_values=block * block_size),
        block_tables=np.concatenate([step.block_tables, tables]),
        seq_lens=np.pad(step.seq_lens, (0, more), constant_values=1),
        cu_q_lens=counting,  # one token each
        logits_indices=np.concatenate([step.logits_indices, counting[len(step.logits_indices) : batch]]),
    )
