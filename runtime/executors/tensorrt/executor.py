"""`RtxExecutor`: runs engines of tensorrt-rtx. No torch: tensorrt-rtx, cuda.bindings and numpy.

load    GPU ⇒ checks ⇒ engine ⇒ weights on the GPU, as many as fit beside the slots ⇒ slots, zeroed
step    cut into runs over neighbouring slots ⇒ for each: small arrays to the GPU ⇒ engine ⇒ logits to the host ⇒ sample
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.tensorrt.checks import block_bytes, check_gpu, check_memory, check_slots, slot_bytes
from llmbuild.runtime.executors.tensorrt.inputs import ALIGNMENT, LogitsArea
from llmbuild.runtime.executors.tensorrt.slots import Run, SlotRuns
from llmbuild.runtime.executors.tensorrt.streaming import HEADROOM

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine
    from llmbuild.runtime.sampler import SampledTokens, SamplingBatch

PREFILL, DECODE = 0, 1  # profiles of the engine, in the order in which it was built


class RtxExecutor:
    """Runs steps of one engine of the tensorrt-rtx target. One thread at a time.

    A block of its KV cache is a slot, which holds one whole sequence: `block_size` is the engine's max_seq_len.

    Args:
        engine: An open engine.
        num_blocks: Slots; None for as many as sequences may run.
        device: Number of the GPU.
        runtime_cache: File that keeps the kernels compiled for this GPU; None: one in the user's cache directory.
        make_device, make_session: Put stand-ins in place, for tests.

    Raises:
        EngineError: No GPU, one that the engine holds no code for, too little memory, or TensorRT-RTX refuses.
        ConfigError: num_blocks is more than the engine can run.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_blocks: int | None = None,
        device: int = 0,
        runtime_cache: str | Path | None = None,
        make_device: Callable[[int], Any] | None = None,
        make_session: Callable[..., Any] | None = None,
    ) -> None:
        if make_device is None:
            from llmbuild.runtime.executors.cuda.driver import Device

            make_device = Device
        if make_session is None:
            from llmbuild.runtime.executors.tensorrt.session import RtxSession

            make_session = RtxSession
        manifest = engine.manifest
        section, cache = manifest.target.section, manifest.kv_cache
        self.block_size = cache.block_size
        self.num_blocks = check_slots(num_blocks, section["slots"])
        file = engine.file(section["engine"])
        gpu: Any = make_device(device)
        self._device = gpu
        check_gpu(gpu, section, engine.path)
        streams = section["options"]["weight_streaming"]  # then weights get what the slots leave
        check_memory(gpu, self.num_blocks, cache, 0 if streams else file.stat().st_size)
        self._stream = gpu.stream()
        digest = next(entry.sha256 for entry in manifest.files if entry.path == section["engine"])
        kept = Path(runtime_cache) if runtime_cache is not None else cache_file(digest, gpu.sm)
        self._session = make_session(file, gpu, self._stream, kept)
        self._runs = SlotRuns(self.num_blocks, self.block_size, prefill_batch=section["prefill_batch"])
        self._vocab_size = self._session.vocab_size

        self._slot_bytes = {
            f"{name}.{layer}": slot_bytes(cache, layer, name)
            for layer in range(len(cache.layers))
            for name in ("keys", "values")
        }
        self._slot_shapes = {
            f"{name}.{index}": (layer.num_kv_heads, cache.block_size, width)
            for index, layer in enumerate(cache.layers)
            for name, width in (("keys", layer.head_dim), ("values", layer.v_head_dim))
        }
        tokens = max(manifest.limits.max_num_tokens * section["prefill_batch"], self.num_blocks)
        self._input_bytes = 4 * (2 * tokens + self.block_size + 3 * self.num_blocks) + 5 * ALIGNMENT
        self._logits = LogitsArea(max(self.num_blocks, section["prefill_batch"]), self._vocab_size)
        besides = self._input_bytes + self._logits.num_bytes + self.num_blocks * block_bytes(cache) + HEADROOM
        self._session.prepare((PREFILL, DECODE), gpu.memory()[0] - besides if streams else None)
        self._slots = {name: gpu.allocate(self.num_blocks * size) for name, size in self._slot_bytes.items()}
        for name, address in self._slots.items():  # a weight of 0 times a NaN would be one
            gpu.fill(address, 0, self.num_blocks * self._slot_bytes[name], self._stream)
        self._inputs, self._staged = gpu.allocate(self._input_bytes), gpu.allocate_host(self._input_bytes)
        self._logits.allocate(gpu)

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        from llmbuild.runtime.sampler import sample

        return sample(self.forward(step), sampling)

    def forward(self, step: StepInput) -> npt.NDArray[np.float32]:
        self._device.make_current()
        logits = np.empty((len(step.logits_indices), self._vocab_size), np.float32)
        for run in self._runs.split(step):
            logits[run.rows] = self._run(run)
        return logits

    def _run(self, run: Run) -> npt.NDArray[np.float32]:
        """Execute a run; return the logits that are wanted of it. They are valid until the next run."""
        shapes, addresses, end = {}, {"logits": self._logits.address}, 0
        for name, array in run.inputs.items():
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + array.nbytes
            self._staged.bytes[begin:end] = np.frombuffer(array.tobytes(), np.uint8)
            shapes[name], addresses[name] = array.shape, self._inputs + begin
        self._device.upload(self._inputs, self._staged.address, end, self._stream)
        for name, start in self._slots.items():
            place = start + run.first * self._slot_bytes[name]
            shapes[name] = (run.batch, *self._slot_shapes[name])
            addresses[name] = addresses[f"{name}.out"] = place  # written in place
        profile = DECODE if run.inputs["input_ids"].shape[1] == 1 else PREFILL
        self._session.run(profile, shapes, addresses)
        return self._logits.fetch(len(run.rows), self._stream)

    def close(self) -> None:
        self._device.make_current()
        self._session.close()
        for address in (*self._slots.values(), self._inputs):
            self._device.free(address)
        self._device.free_host(self._staged)
        self._logits.free()
        self._device.free_stream(self._stream)
        self._device.close()


def cache_file(digest: str, sm: int) -> Path:
    """Return where kernels compiled for an engine, by its SHA-256, on one kind of GPU are kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "llmbuild" / f"rtx-{digest[:32]}-sm{sm}.cache"
