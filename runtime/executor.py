"""The executor protocol: what a target's runtime half must do for the scheduler. Numpy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llmbuild.runtime.sampler import SampledTokens, SamplingBatch


class StepInput(NamedTuple):
    """One step's packed batch. All int32, no padding.

    Sequence b of B owns the tokens [cu_q_lens[b], cu_q_lens[b + 1]); its cache, this step included, is seq_lens[b]
    tokens long, and its newest token sits at position seq_lens[b] - 1:

        cached before       this step
        |----------------|-------------|
        0        seq_len - q_len     seq_len
    """

    input_ids: np.ndarray  # [T]
    position_ids: np.ndarray  # [T]
    slot_mapping: np.ndarray  # [T] where each token's K and V go: block * block_size + offset
    block_tables: np.ndarray  # [B, max_blocks], rows padded with 0 past the sequence's blocks
    seq_lens: np.ndarray  # [B]
    cu_q_lens: np.ndarray  # [B + 1]
    logits_indices: np.ndarray  # [L] rows of the packed tokens whose logits are wanted


class PendingTokens:
    """The tokens of a step that may still run."""

    def __init__(self, result: Callable[[], SampledTokens]) -> None:
        self._result = result

    def result(self) -> SampledTokens:
        """Wait for the tokens. Once only.

        Raises:
            LLMBuildError: A row's logits hold NaN, or nothing but -inf.
        """
        return self._result()


class Executor(Protocol):
    """Runs steps of one loaded engine. Owns the KV pool of `num_blocks` blocks of `block_size` tokens."""

    num_blocks: int
    block_size: int

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        """Run the model and sample one token for each of the L rows asked for."""
        ...

    def forward(self, step: StepInput) -> np.ndarray:
        """Run the model and return float32 logits [L, V] on the host (tests, accuracy reports)."""
        ...

    def close(self) -> None:
        """Free the device. The executor cannot be used afterwards."""
        ...


@runtime_checkable
class AsyncExecutor(Executor, Protocol):
    """An executor whose steps can run while the host prepares the next."""

    def execute_async(
        self, step: StepInput, sampling: SamplingBatch, feed: npt.NDArray[np.int32] | None = None
    ) -> PendingTokens:
        """Start a step. At most two are pending: a step's tokens are taken before the step after next starts.

        Args:
            feed: int32 [T], for each token the row of the step before whose sampled token it is, -1 where
                `step.input_ids` holds it. None: it holds all.
        """
        ...

    def warm_up(self) -> None:
        """Do what else the first steps would have to: choices, captures. Takes seconds."""
        ...

    def can_overlap(self, sampling: SamplingBatch) -> bool:
        """Whether a step so sampled may start before the host has seen the tokens of the step before."""
        ...
