"""All that is asked of TensorRT-RTX's runtime: open an engine, a context for each profile, bind addresses, enqueue.

Never executed where llmbuild is developed: TensorRT-RTX runs on no GPU there. Kept so small that it can be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.errors import EngineError, LLMBuildError

if TYPE_CHECKING:
    from llmbuild.runtime.executors.cuda.driver import Device


class RtxSession:
    """An open engine.

    Args:
        engine: The file that the builder wrote.
        device: The GPU, current in this thread.
        stream: Where everything runs.
        cache: File of kernels that TensorRT-RTX compiled for this GPU: read if it exists. None keeps none.

    Raises:
        EngineError: TensorRT-RTX does not take the engine.
    """

    def __init__(self, engine: Path, device: Device, stream: Any, cache: Path | None) -> None:
        import tensorrt_rtx as trt

        self._trt = trt
        self._log = make_log(trt)
        self._runtime = trt.Runtime(self._log)
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        if self._engine is None:
            raise EngineError(
                f"TensorRT-RTX {trt.__version__} does not open the engine: {self._log.reason()}",
                where=f"{engine}, GPU {device.ordinal}: {device.name}",
                hint="convert the model again with the tensorrt-rtx installed here; `nvidia-smi` shows GPU and driver",
            )
        self._stream = stream
        self._cache_file = cache
        config = self._engine.create_runtime_config()
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        self._cache = config.create_runtime_cache()
        if cache is not None and cache.is_file():
            self._cache.deserialize(cache.read_bytes())
        config.set_runtime_cache(self._cache)
        self._contexts = [self._context(config, profile) for profile in range(self._engine.num_optimization_profiles)]

    def _context(self, config: Any, profile: int) -> Any:
        context = self._engine.create_execution_context(config)
        if context is None or not context.set_optimization_profile_async(profile, int(self._stream)):
            raise EngineError(
                f"TensorRT-RTX cannot prepare profile {profile} of the engine: {self._log.reason()}",
                hint="free memory of the GPU, or load the engine with fewer kv_cache_blocks",
            )
        return context

    @property
    def vocab_size(self) -> int:
        return int(self._engine.get_tensor_shape("logits")[1])

    def run(self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Put one execution into the stream.

        Args:
            shapes: Of every input.
            addresses: Of every input and output.

        Raises:
            LLMBuildError: TensorRT-RTX refuses.
        """
        context = self._contexts[profile]
        done = all(context.set_input_shape(name, shape) for name, shape in shapes.items())
        done = done and all(context.set_tensor_address(name, address) for name, address in addresses.items())
        if not (done and context.execute_async_v3(int(self._stream))):
            raise LLMBuildError(f"TensorRT-RTX did not run the step: {self._log.reason()}", where=f"profile {profile}")

    def close(self) -> None:
        """Keep what was compiled, and let go of the engine."""
        if self._cache_file is not None:
            with contextlib.suppress(OSError):  # a cache: without it the next start takes longer
                self._cache_file.parent.mkdir(parents=True, exist_ok=True)
                self._cache_file.write_bytes(bytes(self._cache.serialize()))
        self._contexts.clear()
        del self._engine, self._runtime


def make_log(trt: Any) -> Any:
    """A logger that keeps the last errors."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors = [*self.errors[-3:], message]

        def reason(self) -> str:
            return "; ".join(self.errors) or "it gives no reason"

    return Log()
