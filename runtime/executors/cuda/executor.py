"""`CudaExecutor`: runs an engine's launch plan on one NVIDIA GPU. No torch, no Triton: cuda.bindings and numpy.

load    plan ⇒ checks ⇒ kernels ⇒ memory ⇒ weights
step    write inputs ⇒ one copy ⇒ graph (decode) or op by op (mixed) ⇒ logits ⇒ sample
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llmbuild.runtime.executor import PendingTokens, StepInput
from llmbuild.runtime.executors.cuda.buckets import batch_buckets, bucket_of
from llmbuild.runtime.executors.cuda.graphs import DecodeGraphs
from llmbuild.runtime.executors.cuda.load import Options, load, open_plan
from llmbuild.runtime.executors.cuda.step_program import KernelStep, Kind, StepSizes

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine
    from llmbuild.runtime.sampler import SampledTokens, SamplingBatch

NOTHING = ""
TAILS = (NOTHING, "greedy", "full")  # ways of sampling that run in graphs, behind the plan's ops


class CudaExecutor:
    """Runs steps of one engine of the cuda target. Any thread may call it, one at a time.

    Args:
        engine: An open engine.
        num_blocks: Blocks of the KV pool; None for what fits.
        kv_memory_fraction: How much of the free memory that weights and activations leave may hold KV blocks.
        device: Number of the GPU.
        graphs: Capture decode steps in CUDA graphs.
        random_weights: Fill the weights with noise instead of reading them, for benchmarks.
        tune: Time the few best algorithms of cuBLASLt for each shape once, and remember the choice.
        wait: Without graphs, wait for each op, so that a failure of the GPU names the op that made it. Slow.

    Raises:
        EngineError: cuda-bindings, the driver, the GPU or its memory do not do, or the engine is damaged. Found before
            any weight is read.
        ConfigError: kv_memory_fraction is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_blocks: int | None = None,
        kv_memory_fraction: float = 0.9,
        device: int = 0,
        graphs: bool = True,
        random_weights: bool = False,
        tune: bool = True,
        wait: bool = False,
    ) -> None:
        with ExitStack() as stack:
            gpu, plan, pack = open_plan(engine, device, stack)
            limits = plan.limits
            self._buckets = batch_buckets(min(limits.max_batch_size, limits.max_num_tokens))
            options = Options(
                num_blocks=num_blocks,
                kv_memory_fraction=kv_memory_fraction,
                num_graphs=len(self._buckets) * len(TAILS) if graphs else 0,
                random_weights=random_weights,
                tune=tune,
                wait=wait and not graphs,
            )
            loaded = load(engine, gpu, plan, pack, options, stack)
            self._device, self._stream = gpu, loaded.stream
            self._inputs, self._program, self._library = loaded.inputs, loaded.program, loaded.library
            self._sampler, self._logits = loaded.sampler, loaded.logits
            self._limits = limits
            self.num_blocks, self.block_size = loaded.num_blocks, limits.block_size
            self._tails: dict[str, list[KernelStep]] = {NOTHING: []}
            if self._sampler is not None:
                self._tails |= {name: self._sampler.steps[name] for name in TAILS if name != NOTHING}
            self._feeding = self._sampler.steps["feed"] if self._sampler is not None else []
            self._graphs: DecodeGraphs | None = None
            if graphs:
                longest = engine.manifest.limits.max_seq_len
                self._graphs = DecodeGraphs(gpu, self._program, self._feeding, self._tails, longest=longest)
                stack.callback(self._graphs.close)
            stack.callback(gpu.synchronize, self._stream)  # the first thing that closing does
            self._resources = stack.pop_all()

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        return self.execute_async(step, sampling).result()

    def execute_async(
        self, step: StepInput, sampling: SamplingBatch, feed: npt.NDArray[np.int32] | None = None
    ) -> PendingTokens:
        """Put a step into the stream and return at once where the device samples; `can_overlap` tells.

        At most two steps may be pending: the tokens of a step must be taken before the step after next is put.

        Args:
            feed: int32 [T], for each token the row of the step before whose sampled token it is, -1 where
                `step.input_ids` holds it. None: it holds all.
        """
        from llmbuild.runtime.sampler import sample

        sampler = self._sampler
        choice = sampler.choose(sampling) if sampler is not None else None
        if sampler is None or choice is None:
            if feed is not None:
                raise ValueError("the host samples this step: its input cannot be fed on the device")
            tokens = sample(self._run(step), sampling)
            return PendingTokens(lambda: tokens)
        self._device.make_current()
        tail = choice.draw if choice.draw in TAILS else NOTHING
        rows = len(step.logits_indices)
        sampler.write(sampling, choice, max(rows, self._padded(step)), self._stream)
        self._launch(step, tail, feed)
        sizes = StepSizes(tokens=len(step.input_ids), sequences=len(step.seq_lens), rows=rows, longest=0)
        turn = sampler.finish(choice, sizes, self._stream, drawn=tail != NOTHING)

        def result() -> SampledTokens:
            self._device.make_current()
            return sampler.result(turn, sampling, choice)

        return PendingTokens(result)

    def can_overlap(self, sampling: SamplingBatch) -> bool:
        """Whether a step so sampled may be put before the host has seen the tokens of the step before."""
        if self._sampler is None or self._sampler.choose(sampling) is None:
            return False
        return all(extra is None or (extra.output is None and extra.banned is None) for extra in sampling.extras or ())

    def forward(self, step: StepInput) -> npt.NDArray[np.float32]:
        most, wanted = self._limits.max_batch_size, step.logits_indices
        if len(wanted) <= most:
            return self._run(step).copy()
        # More rows than a step of sequences has: the same step again, which writes the same keys and values.
        groups = [wanted[at : at + most] for at in range(0, len(wanted), most)]
        return np.concatenate([self._run(step._replace(logits_indices=group)).copy() for group in groups])

    def warm_up(self) -> None:
        """Choose all GEMM algorithms and capture all graphs, so that no step has to. Takes seconds."""
        self._device.make_current()
        idle = _idle_step(self.num_blocks, self.block_size)
        if self._sampler is not None:
            self._sampler.write_sources(None, self._buckets[-1], self._stream)
        for bucket in self._buckets if self._graphs is not None else ():
            for tail in self._tails:
                self._inputs.write(idle, bucket)
                self._inputs.send(self._stream)
                self._graphs.run(bucket, tail, self._stream)  # type: ignore[union-attr]
        for tokens in batch_buckets(self._limits.max_num_tokens):
            sizes = StepSizes(tokens=tokens, sequences=1, rows=1, longest=tokens)
            self._program.prepare("mixed", sizes, self._stream)
        self._device.synchronize(self._stream)
        self._library.save()

    @property
    def captured(self) -> tuple[int, ...]:
        """The batch sizes that have a graph."""
        return self._graphs.captured if self._graphs is not None else ()

    def close(self) -> None:
        self._device.make_current()
        self._resources.close()

    def _run(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Return float32 logits [L, V] that the next call may overwrite."""
        self._device.make_current()
        self._launch(step, NOTHING)
        rows = len(step.logits_indices)
        self._logits.fetch(rows, self._stream)
        self._device.synchronize(self._stream)
        return self._logits.array(rows)

    def _padded(self, step: StepInput) -> int:
        """Return the batch size of the graph that the step runs in; 0 if it runs op by op."""
        sequences = len(step.seq_lens)
        if self._graphs is None or len(step.input_ids) != sequences:
            return 0
        return bucket_of(sequences, self._buckets)

    def _launch(self, step: StepInput, tail: str, feed: npt.NDArray[np.int32] | None = None) -> None:
        """Put the step's copy, its ops and what runs behind them into the stream."""
        tokens, sequences = len(step.input_ids), len(step.seq_lens)
        bucket = self._padded(step)
        self._inputs.write(step, bucket or None)
        self._inputs.send(self._stream)
        if self._sampler is not None and (bucket or feed is not None):  # graphs look at the sources in every step
            self._sampler.write_sources(feed, bucket or tokens, self._stream)
        if self._graphs is not None and bucket:
            self._graphs.run(bucket, tail, self._stream)
            return
        kind: Kind = "decode" if tokens == sequences else "mixed"  # no sequence is without a token
        sizes = StepSizes(
            tokens=tokens,
            sequences=sequences,
            rows=len(step.logits_indices),
            longest=int(step.seq_lens.max()),
        )
        self._program.prepare(kind, sizes, self._stream)
        for each in self._feeding if feed is not None else ():
            each.run(sizes, self._stream)
        self._program.run(kind, sizes, self._stream)
        for each in self._tails[tail]:
            each.run(sizes, self._stream)


def _idle_step(dummy_block: int, block_size: int) -> StepInput:
    """A decode step of one sequence of one token, in the block of the padding rows."""

    def array(*values: int) -> npt.NDArray[np.int32]:
        return np.array(values, np.int32)

    return StepInput(
        input_ids=array(0),
        position_ids=array(0),
        slot_mapping=array(dummy_block * block_size),
        block_tables=array(dummy_block).reshape(1, 1),
        seq_lens=array(1),
        cu_q_lens=array(0, 1),
        logits_indices=array(0),
    )
