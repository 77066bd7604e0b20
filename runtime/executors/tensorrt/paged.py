"""`TensorRTExecutor`: runs engines of the full TensorRT. No torch: tensorrt, cuda.bindings and numpy.

load    GPU ⇒ checks ⇒ engine ⇒ KV pools in the memory that is left
step    packed arrays to the GPU, one copy ⇒ engine, which writes the pools in place ⇒ logits to the host ⇒ sample
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.tensorrt.checks import (
    check_engine_fits,
    check_plugin,
    check_same_gpu,
    choose_blocks,
    slot_bytes,
)

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine
    from llmbuild.runtime.sampler import SampledTokens, SamplingBatch

MIXED, DECODE = 0, 1  # profiles of the engine, in the order in which it was built
ALIGNMENT = 256


class TensorRTExecutor:
    """Runs steps of one engine of the tensorrt target, over a paged cache. One thread at a time.

    Args:
        engine: An open engine.
        num_blocks: Blocks of the KV pool; None for what fits.
        kv_memory_fraction: How much of the memory that the engine leaves free may hold KV blocks.
        device: Number of the GPU.
        make_device, make_session: Put stand-ins in place, for tests.

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
        file = engine.file(section["engine"])
        gpu: Any = make_device(device)
        self._device = gpu
        check_same_gpu(gpu, section, engine.path)
        check_plugin(section, engine.path)
        check_engine_fits(gpu, file.stat().st_size)
        self._stream = gpu.stream()
        self._session = make_session(file, gpu, self._stream)
        self._vocab_size = self._session.vocab_size

        # Each array of a step at its largest, one behind the other.
        batch, tokens = limits.max_batch_size, limits.max_num_tokens
        counts = [tokens] * 3 + [batch * self._stride, batch, batch + 1, batch]
        self._places = dict(zip(StepInput._fields, places(counts), strict=True))
        input_bytes = places(counts)[-1] + counts[-1] * 4
        logits_bytes = batch * self._vocab_size * 4
        self.num_blocks = choose_blocks(
            gpu,
            cache,
            asked=num_blocks,
            fraction=kv_memory_fraction,
            most=min(self._stride * batch, section["most_slots"] // self.block_size),
            sequence=self._stride,
            used=input_bytes + logits_bytes,
        )
        self._inputs, self._staged = gpu.allocate(input_bytes), gpu.allocate_host(input_bytes)
        self._logits, self._result = gpu.allocate(logits_bytes), gpu.allocate_host(logits_bytes)
        self._pools: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for index, layer in enumerate(cache.layers):
            for name, width in (("keys", layer.head_dim), ("values", layer.v_head_dim)):
                size = self.num_blocks * slot_bytes(cache, index, name)
                address = gpu.allocate(size)
                gpu.fill(address, 0, size, self._stream)  # a weight of 0 times a NaN would be one
                self._pools[f"{name}.{index}"] = address
                slots = self.num_blocks * self.block_size
                self._shapes[f"{name}.{index}"] = (slots, layer.num_kv_heads, width)
        # A pool goes in and comes out at one address: the plugin refuses anything else.
        self._pool_addresses = {**self._pools, **{f"{name}.out": place for name, place in self._pools.items()}}

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        from llmbuild.runtime.sampler import sample

        return sample(self.forward(step), sampling)

    def forward(self, step: StepInput) -> npt.NDArray[np.float32]:
        self._device.make_current()
        wanted = step.logits_indices
        # More rows than a step of sequences has: the same step again, which writes the same keys and values.
        groups = [wanted[at : at + self._max_rows] for at in range(0, len(wanted), self._max_rows)] or [wanted]
        return np.concatenate([self._run(step._replace(logits_indices=group)) for group in groups])

    def _run(self, step: StepInput) -> npt.NDArray[np.float32]:
        rows = len(step.logits_indices)
        tables = np.zeros((len(step.seq_lens), self._stride), np.int32)
        tables[:, : step.block_tables.shape[1]] = step.block_tables
        # A step makes at least one row of logits, which nobody has to look at.
        wanted = step.logits_indices if rows else np.zeros(1, np.int32)
        arrays = step._replace(block_tables=tables, logits_indices=wanted)._asdict()
        shapes, addresses, end = dict(self._shapes), {**self._pool_addresses, "logits": self._logits}, 0
        for name, array in arrays.items():
            begin, data = self._places[name], np.ascontiguousarray(array, np.int32)
            end = begin + data.nbytes
            self._staged.bytes[begin:end] = data.reshape(-1).view(np.uint8)
            shapes[name], addresses[name] = data.shape, self._inputs + begin
        self._device.upload(self._inputs, self._staged.address, end, self._stream)
        profile = DECODE if len(step.input_ids) == len(step.seq_lens) else MIXED
        self._session.run(profile, shapes, addresses)
        size = rows * self._vocab_size * 4
        if size:
            self._device.download(self._result.address, self._logits, size, self._stream)
        # Also without logits: the host memory of the inputs is written again by the next step.
        self._device.synchronize(self._stream)
        logits: npt.NDArray[np.float32] = self._result.bytes[:size].view(np.float32)
        return logits.reshape(rows, self._vocab_size).copy()

    def close(self) -> None:
        self._device.make_current()
        self._session.close()
        for address in (*self._pools.values(), self._inputs, self._logits):
            self._device.free(address)
        for memory in (self._staged, self._result):
            self._device.free_host(memory)
        self._device.free_stream(self._stream)
        self._device.close()


def places(counts: list[int]) -> list[int]:
    """Return where arrays of so many int32 begin, each at a multiple of 256 bytes."""
    begins, end = [], 0
    for count in counts:
        begins.append(end)
        end += -(-4 * count // ALIGNMENT) * ALIGNMENT
    return begins
