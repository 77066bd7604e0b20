"""`CudaExecutor`: runs an engine's launch plan on one NVIDIA GPU. No torch, no Triton: cuda.bindings and numpy.

load    plan ⇒ checks ⇒ kernels ⇒ memory ⇒ weights
step    write inputs ⇒ one copy ⇒ graph (decode) or op by op (mixed) ⇒ logits ⇒ sample
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llmbuild.engine.kernel_pack import KernelPack
from llmbuild.engine.launch_plan import LaunchPlan
from llmbuild.errors import EngineError
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.cuda import memory, weights
from llmbuild.runtime.executors.cuda.addresses import Addresses
from llmbuild.runtime.executors.cuda.buckets import batch_buckets, bucket_of
from llmbuild.runtime.executors.cuda.checks import check_gpu, load_kernels, needs_library
from llmbuild.runtime.executors.cuda.device_sampler import DeviceSampler
from llmbuild.runtime.executors.cuda.driver import OUT_OF_MEMORY, CudaError, Device
from llmbuild.runtime.executors.cuda.gemm_memory import GemmMemory, memory_paths
from llmbuild.runtime.executors.cuda.gemms import Gemms, NoGemms, open_library
from llmbuild.runtime.executors.cuda.graphs import DecodeGraphs
from llmbuild.runtime.executors.cuda.inputs import InputArea, input_layout
from llmbuild.runtime.executors.cuda.logits import LogitsReader
from llmbuild.runtime.executors.cuda.sampling_area import SamplingArea, sampling_bytes
from llmbuild.runtime.executors.cuda.step_program import GemmLibrary, KernelStep, Kind, StepProgram, StepSizes

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine
    from llmbuild.runtime.sampler import SampledTokens, SamplingBatch

NOTHING = ""
TAILS = (NOTHING, "greedy", "full")  # ways of sampling that run in graphs, behind the plan's ops


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
        manifest = engine.manifest
        section = manifest.target.section
        with ExitStack() as stack:
            self._device = gpu = Device(device)
            stack.callback(gpu.close)
            check_gpu(gpu, section["sms"], engine.path)
            plan = LaunchPlan.read(engine.file(section["plans"][str(gpu.sm)]))
            pack = KernelPack.open(engine.file(section["kernels"][str(gpu.sm)]))
            self.block_size = plan.limits.block_size
            self._max_num_tokens = plan.limits.max_num_tokens
            self._max_batch_size = plan.limits.max_batch_size
            self._max_seq_len = manifest.limits.max_seq_len
            self._buckets = batch_buckets(min(plan.limits.max_batch_size, plan.limits.max_num_tokens))
            kernels = load_kernels(plan, pack, gpu)
            weight_file = None if random_weights else engine.file(section["weights"])
            stored = [] if weight_file is None else weights.stored_tensors(weight_file, plan)
            with_library = needs_library(plan)
            lt = open_library(gpu) if with_library else None

            placed = weights.layout(plan)
            needs = memory.Needs(
                weights=placed.num_bytes,
                arena=plan.arena_bytes,
                inputs=input_layout(plan)[1],
                sampling=sampling_bytes(plan),
                workspace=memory.GEMM_WORKSPACE if with_library else 0,
                graphs=memory.GRAPH_BYTES * len(self._buckets) * len(TAILS) if graphs else 0,
            )
            self.num_blocks = memory.choose_blocks(
                plan,
                needs,
                free=gpu.memory()[0],
                fraction=kv_memory_fraction,
                max_seq_len=self._max_seq_len,
                num_blocks=num_blocks,
                gpu=f"GPU {gpu.ordinal}, {gpu.name}",
            )
            try:
                self._stream = gpu.stream()
                stack.callback(gpu.free_stream, self._stream)
                weights_at = _allocate(stack, gpu, placed.num_bytes)
                arena = _allocate(stack, gpu, plan.arena_bytes)
                slots = (self.num_blocks + 1) * self.block_size  # the last block is the padding rows'
                pools = {pool.name: _allocate(stack, gpu, slots * pool.token_bytes) for pool in plan.pools}
                self._inputs = InputArea(plan, gpu, dummy_block=self.num_blocks)
                stack.callback(self._inputs.close)
                area = None
                if plan.sampling is not None:
                    area = SamplingArea(plan, plan.sampling, gpu, self._stream)
                    stack.callback(area.close)
                library: GemmLibrary = NoGemms()
                if lt is not None:
                    workspace = _allocate(stack, gpu, needs.workspace)
                    remembered = GemmMemory(f"cuBLASLt {lt.version}, {gpu.name}", memory_paths(engine.path))
                    library = Gemms(
                        *(gpu, lt, workspace, needs.workspace), limits=plan.limits, tune=tune, memory=remembered
                    )
                    stack.callback(library.close)
            except CudaError as error:
                raise _explained(error, needs) from error
            address = Addresses.of(
                plan,
                arena=arena,
                inputs=self._inputs.addresses | (area.addresses if area is not None else {}),
                weights={name: weights_at + offset for name, offset in placed.offsets.items()},
                pools=pools,
                state=area.state_addresses if area is not None else {},
            )
            self._program = StepProgram(plan, gpu, kernels, address, library, wait=wait and not graphs)
            stack.callback(self._program.close)
            self._library = library
            self._sampler: DeviceSampler | None = None
            self._tails: dict[str, list[KernelStep]] = {NOTHING: []}
            if plan.sampling is not None and area is not None:
                self._sampler = DeviceSampler(
                    *(plan.sampling, gpu, area, self._program.kernel_step),
                    max_rows=plan.limits.max_batch_size,
                    vocab_size=manifest.model.vocab_size,
                )
                stack.callback(self._sampler.close)
                self._tails |= {name: self._sampler.steps[name] for name in TAILS if name != NOTHING}
            self._graphs = None
            if graphs:
                self._graphs = DecodeGraphs(gpu, self._program, self._tails, longest=self._max_seq_len)
                stack.callback(self._graphs.close)
            self._logits = LogitsReader(plan, gpu, address(plan.logits), manifest.model.vocab_size)
            stack.callback(self._logits.close)

            # Nothing is read before it is written, but what a mask hides must not be NaN either.
            gpu.fill(arena, 0, plan.arena_bytes, self._stream)
            for pool in plan.pools:
                gpu.fill(pools[pool.name], 0, slots * pool.token_bytes, self._stream)
            if weight_file is None:
                weights.fill_with_noise(gpu, plan, weights_at)
            else:
                weights.upload(gpu, weight_file, stored, weights_at)
            gpu.synchronize(self._stream)
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
        most, wanted = self._max_batch_size, step.logits_indices
        if len(wanted) <= most:
            return self._run(step).copy()
        # More rows than a step of sequences has: the same step again, which writes the same keys and values.
        groups = [wanted[at : at + most] for at in range(0, len(wanted), most)]
        return np.concatenate([self._run(step._replace(logits_indices=group)).copy() for group in groups])

    def warm_up(self) -> None:
        """Choose all GEMM algorithms and capture all graphs, so that no step has to. Takes seconds."""
        self._device.make_current()
        idle = _idle_step(self.num_blocks, self.block_size)
        for bucket in self._buckets if self._graphs is not None else ():
            for tail in self._tails:
                self._inputs.write(idle, bucket)
                self._inputs.send(self._stream)
                self._graphs.run(bucket, tail, self._stream)  # type: ignore[union-attr]
        for tokens in batch_buckets(self._max_num_tokens):
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
        if feed is not None and self._sampler is not None:
            self._sampler.feed(feed, bucket or tokens, self._stream)
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
        self._program.run(kind, sizes, self._stream)
        for each in self._tails[tail]:
            each.run(sizes, self._stream)


def _allocate(stack: ExitStack, device: Device, num_bytes: int) -> int:
    """Allocate memory that the stack frees."""
    address = device.allocate(num_bytes)
    stack.callback(device.free, address)
    return address


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


def _explained(error: CudaError, needs: memory.Needs) -> Exception:
    if error.code != OUT_OF_MEMORY:
        return error
    return EngineError(
        f"the GPU's memory ran out while loading: {error.what}",
        where=f"weights {needs.weights} bytes, activations {needs.arena} bytes",
        hint="end other processes that use the GPU, or pass a lower kv_memory_fraction",
    )
