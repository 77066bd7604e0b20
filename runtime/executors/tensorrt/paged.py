"""`TensorRTExecutor`: runs engines of the full TensorRT. No torch: tensorrt, cuda.bindings and numpy.

load    GPU ⇒ checks ⇒ engine ⇒ weights, if they are not in it ⇒ KV pools in the memory that is left
step    packed arrays to the GPU, one copy ⇒ engine, which writes the pools in place ⇒ logits to the host ⇒ sample

A decode step is padded to one of a few batch sizes and captured in a CUDA graph. Padding rows write into a block behind
those that are handed out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.cuda.buckets import batch_buckets, bucket_of
from llmbuild.runtime.executors.cuda.memory import GRAPH_BYTES, check_fraction
from llmbuild.runtime.executors.tensorrt.checks import (
    block_bytes,
    check_engine_fits,
    check_plugin,
    check_same_gpu,
    choose_blocks,
)
from llmbuild.runtime.executors.tensorrt.graphs import StepGraphs, padded
from llmbuild.runtime.executors.tensorrt.inputs import LogitsArea, StepArea
from llmbuild.runtime.executors.tensorrt.pools import Pools
from llmbuild.runtime.executors.tensorrt.streaming import HEADROOM

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine
    from llmbuild.runtime.sampler import SampledTokens, SamplingBatch

MIXED, DECODE = 0, 1  # profiles of the engine, in the order in which it was built


class TensorRTExecutor:
    """Runs steps of one engine of the tensorrt target, over a paged cache. One thread at a time.

    Args:
        engine: An open engine.
        num_blocks: Blocks of the KV pool; None for what fits.
        kv_memory_fraction: How much of the memory that the engine leaves free may hold KV blocks.
        device: Number of the GPU.
        graphs: Capture decode steps in CUDA graphs.
        make_device, make_session: Put stand-ins in place, for tests.

    If the engine may leave weights in host memory, as many lie on the GPU as fit beside `num_blocks`, or, if that is
    None, beside one sequence of the greatest length.

    Warns:
        RuntimeWarning: A decode step cannot be captured. Steps go on without graphs.

    Raises:
        EngineError: No GPU, another kind of GPU than the engine was built on, a plugin of another version, too little
            memory, or TensorRT refuses.
        ConfigError: An option is out of range, or TensorRT is missing.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_blocks: int | None = None,
        kv_memory_fraction: float = 0.9,
        device: int = 0,
        graphs: bool = True,
        make_device: Callable[[int], Any] | None = None,
        make_session: Callable[..., Any] | None = None,
    ) -> None:
        if make_device is None:
            from llmbuild.runtime.executors.cuda.driver import Device

            make_device = Device
        if make_session is None:
            from llmbuild.runtime.executors.tensorrt.session import PluginSession

            make_session = PluginSession
        manifest = engine.manifest
        section, cache, limits = manifest.target.section, manifest.kv_cache, manifest.limits
        self.block_size = cache.block_size
        self._max_rows, self._stride = limits.max_batch_size, int(section["table_stride"])
        check_fraction(kv_memory_fraction)
        file = engine.file(section["engine"])
        weights = engine.file(section["weights"]) if section["weights"] is not None else None
        streams = section["options"]["weight_streaming"]
        gpu: Any = make_device(device)
        self._device = gpu
        check_same_gpu(gpu, section, engine.path)
        check_plugin(section, engine.path)
        if not streams:
            check_engine_fits(gpu, sum(each.stat().st_size for each in (file, weights) if each is not None))
        self._stream = gpu.stream()
        self._session = make_session(file, gpu, self._stream, weights, plugin=section["plugin"] is not None)
        self._vocab_size = self._session.vocab_size

        batch, tokens = limits.max_batch_size, limits.max_num_tokens
        self._area = StepArea(batch=batch, tokens=tokens, stride=self._stride)
        self._logits = LogitsArea(batch, self._vocab_size)
        self._buckets = batch_buckets(min(batch, tokens)) if graphs else ()
        spare = 1 if graphs else 0  # the block of padding rows
        used = self._area.num_bytes + self._logits.num_bytes + spare * block_bytes(cache)
        used += GRAPH_BYTES * len(self._buckets)

        # Context 0 is for any step; the others are for decode steps, one for each batch size that is captured.
        free, room = gpu.memory()[0], None
        if streams:
            least = math.ceil(self._stride / kv_memory_fraction) if num_blocks is None else num_blocks
            room = free - used - least * block_bytes(cache) - HEADROOM
        taken = self._session.prepare([MIXED, *[DECODE] * max(1, len(self._buckets))], room)
        unseen = max(0, taken - (free - gpu.memory()[0]))  # what TensorRT allocates later
        self._graphs = StepGraphs(gpu, self._session, self._stream)
        self.num_blocks = choose_blocks(
            gpu,
            cache,
            asked=num_blocks,
            fraction=kv_memory_fraction,
            most=min(self._stride * batch, section["most_slots"] // self.block_size - spare),
            sequence=self._stride,
            used=used + unseen,
        )
        self._area.allocate(gpu)
        self._logits.allocate(gpu)
        self._pools = Pools(gpu, cache, self.num_blocks + spare, self._stream)

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        from llmbuild.runtime.sampler import sample

        return sample(self.forward(step), sampling)

    def forward(self, step: StepInput) -> npt.NDArray[np.float32]:
        self._device.make_current()
        wanted = step.logits_indices
        # More rows than a step of sequences has: the same step again, which writes the same keys and values.
        groups = [wanted[at : at + self._max_rows] for at in range(0, len(wanted), self._max_rows)] or [wanted]
        return np.concatenate([self._run(step._replace(logits_indices=group)) for group in groups])

    def warm_up(self) -> None:
        """Capture all graphs, so that no step has to."""
        self._device.make_current()
        nothing = StepInput(*(np.zeros(0, np.int32) for _ in StepInput._fields))
        nothing = nothing._replace(block_tables=np.zeros((0, self._stride), np.int32))
        for bucket in self._buckets:
            self._run_captured(nothing, bucket)
            self._device.synchronize(self._stream)

    @property
    def captured(self) -> tuple[int, ...]:
        """The batch sizes that have a graph."""
        return tuple(self._buckets[context - DECODE] for context in self._graphs.captured)

    @property
    def graph_problem(self) -> str | None:
        """Why steps are not captured, None if they are."""
        return self._graphs.problem

    def _run(self, step: StepInput) -> npt.NDArray[np.float32]:
        rows, sequences = len(step.logits_indices), len(step.seq_lens)
        tables = np.zeros((sequences, self._stride), np.int32)
        tables[:, : step.block_tables.shape[1]] = step.block_tables
        # A step makes at least one row of logits, which nobody has to look at.
        wanted = step.logits_indices if rows else np.zeros(1, np.int32)
        step = step._replace(block_tables=tables, logits_indices=wanted)
        # No sequence is without a token. A graph makes one row of logits for each.
        if self._buckets and len(step.input_ids) == sequences >= rows:
            self._run_captured(step, bucket_of(sequences, self._buckets))
        else:
            decode = not self._buckets and len(step.input_ids) == sequences
            self._session.run(DECODE if decode else MIXED, *self._send(step))
        return self._logits.fetch(rows, self._stream).copy()

    def _run_captured(self, step: StepInput, bucket: int) -> None:
        """Put a decode step into the stream, padded to `bucket` sequences."""
        step = padded(step, bucket, block=self.num_blocks, block_size=self.block_size)
        self._graphs.run(DECODE + self._buckets.index(bucket), *self._send(step))

    def _send(self, step: StepInput) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Put the copy of a step into the stream; return shapes and addresses of all that goes in and out."""
        shapes, addresses = self._area.send(step, self._stream)
        return {**self._pools.shapes, **shapes}, {**self._pools.addresses, **addresses, "logits": self._logits.address}

    def close(self) -> None:
        self._device.make_current()
        self._graphs.close()
        self._session.close()
        self._pools.free()
        self._area.free()
        self._logits.free()
        self._device.free_stream(self._stream)
        self._device.close()
