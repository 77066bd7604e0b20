"""The cpu target's runtime half: onnxruntime over a paged KV pool. Imports numpy and onnxruntime, nothing heavier."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.cpu_dense import split_step
from llmbuild.runtime.executors.cpu_session import CpuSession, check_machine

if TYPE_CHECKING:
    from llmbuild.engine.manifest import Manifest
    from llmbuild.engine.reader import Engine
    from llmbuild.runtime.sampler import SampledTokens, SamplingBatch

MEMORY_SHARE = 0.3  # of the available memory, at most, for KV pools whose size nobody chose


class CpuExecutor:
    """Runs steps of one engine of the cpu target.

    Args:
        engine: An open engine.
        num_blocks: Blocks of the KV pool; None for what the engine's limits need, or what memory allows if less.
        threads: Threads; None for all processors this process may use.

    Raises:
        EngineError: the engine's native operators need another machine.
    """

    def __init__(self, engine: Engine, *, num_blocks: int | None = None, threads: int | None = None) -> None:
        manifest = engine.manifest
        section = manifest.target.section
        library = None
        if section["native"] is not None:
            library = engine.file(section["native"]["library"])
            check_machine(section["native"], library)
        self.block_size = manifest.kv_cache.block_size
        self.num_blocks = default_blocks(manifest) if num_blocks is None else num_blocks
        self._paged = section["attention"] == "paged"
        self._session = CpuSession(
            engine.file(section["model"]),
            engine.file(section["weights"]),
            library,
            slots=self.num_blocks * self.block_size,
            threads=threads or usable_processors(),
        )

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        from llmbuild.runtime.sampler import sample

        return sample(self._logits(step), sampling)

    def forward(self, step: StepInput) -> npt.NDArray[np.float32]:
        return self._logits(step).copy()

    def close(self) -> None:
        del self._session

    def _logits(self, step: StepInput) -> npt.NDArray[Any]:
        """Logits [L, V] that the next call may overwrite."""
        if self._paged:
            return self._session.run(step._asdict())
        runs = split_step(step, self.block_size, self._session.inputs)
        if len(runs) == 1 and np.array_equal(runs[0].rows, np.arange(len(step.logits_indices))):
            return self._session.run(runs[0].inputs)
        logits = np.empty((len(step.logits_indices), self._session.vocab_size), np.float32)
        for run in runs:
            logits[run.rows] = self._session.run(run.inputs)
        return logits


def default_blocks(manifest: Manifest) -> int:
    """Blocks for `max_batch_size` sequences of `max_seq_len` tokens, as far as memory allows; one sequence at least."""
    kv = manifest.kv_cache
    a_sequence = -(-manifest.limits.max_seq_len // kv.block_size)
    wanted = a_sequence * manifest.limits.max_batch_size
    affordable = int(available_memory() * MEMORY_SHARE) // max(1, kv.token_bytes * kv.block_size)
    return max(a_sequence, min(wanted, affordable))


def usable_processors() -> int:
    """Processors that this process may run on, where the system can tell; else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that could be used without swapping."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 << 30
