"""All that is asked of TensorRT's runtimes: open an engine, a context for each profile, bind addresses, enqueue.

Never executed where llmbuild is developed: TensorRT-RTX runs on no GPU there, the full TensorRT cannot be installed.
Kept so small that it can be read; calls are checked against the vendor's bindings and their types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.errors import EngineError, LLMBuildError

if TYPE_CHECKING:
    import tensorrt as trt

    from llmbuild.runtime.executors.cuda.driver import Device


class Session:
    """An open engine.

    Args:
        module: The bindings, and `name` what they are called.
        engine: The file that the builder wrote.
        device: The GPU, current in this thread.
        stream: Where everything runs.

    Raises:
        EngineError: TensorRT does not take the engine.
    """

    def __init__(self, module: Any, name: str, engine: Path, device: Device, stream: Any) -> None:
        self._name, self._stream = name, stream
        self._log = make_log(module)
        self._runtime: trt.Runtime = module.Runtime(self._log)
        self._engine: trt.ICudaEngine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        if self._engine is None:
            package = name.lower()
            raise EngineError(
                f"{name} {module.__version__} does not open the engine: {self._log.reason()}",
                where=f"{engine}, GPU {device.ordinal}: {device.name}",
                hint=f"convert the model again with the {package} installed here; `nvidia-smi` shows GPU and driver",
            )
        self._contexts: list[trt.IExecutionContext] = []

    def _open_contexts(self, *config: Any) -> None:
        """Make a context for each profile. config: a runtime's configuration, where it has one."""
        for profile in range(self._engine.num_optimization_profiles):
            context = self._engine.create_execution_context(*config)
            if context is None or not context.set_optimization_profile_async(profile, int(self._stream)):
                raise EngineError(
                    f"{self._name} cannot prepare profile {profile} of the engine: {self._log.reason()}",
                    hint="free memory of the GPU, or load the engine with fewer kv_cache_blocks",
                )
            self._contexts.append(context)

    @property
    def vocab_size(self) -> int:
        return int(self._engine.get_tensor_shape("logits")[1])

    def run(self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Put one execution into the stream.

        Args:
            shapes: Of every input.
            addresses: Of every input and output.

        Raises:
            LLMBuildError: TensorRT refuses.
        """
        context = self._contexts[profile]
        done = all(context.set_input_shape(name, shape) for name, shape in shapes.items())
        done = done and all(context.set_tensor_address(name, address) for name, address in addresses.items())
        if not (done and context.execute_async_v3(int(self._stream))):
            raise LLMBuildError(f"{self._name} did not run the step: {self._log.reason()}", where=f"profile {profile}")

    def close(self) -> None:
        """Let go of the engine."""
        self._contexts.clear()
        del self._engine, self._runtime


class RtxSession(Session):
    """cache: file of kernels that TensorRT-RTX compiled for this GPU: read if it exists. None keeps none."""

    def __init__(self, engine: Path, device: Device, stream: Any, cache: Path | None) -> None:
        import tensorrt_rtx

        super().__init__(tensorrt_rtx, "TensorRT-RTX", engine, device, stream)
        self._cache_file = cache
        config: Any = self._engine.create_runtime_config()
        config.cuda_graph_strategy = tensorrt_rtx.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        self._cache = config.create_runtime_cache()
        if cache is not None and cache.is_file():
            self._cache.deserialize(cache.read_bytes())
        config.set_runtime_cache(self._cache)
        self._open_contexts(config)

    def close(self) -> None:
        """Keep what was compiled, and let go of the engine."""
        if self._cache_file is not None:
            with contextlib.suppress(OSError):  # a cache: without it the next start takes longer
                self._cache_file.parent.mkdir(parents=True, exist_ok=True)
                self._cache_file.write_bytes(bytes(self._cache.serialize()))
        super().close()


class PluginSession(Session):
    """An engine of the full TensorRT. The plugin is registered before TensorRT looks for it.

    Raises:
        ConfigError: TensorRT's version will not do.
    """

    def __init__(self, engine: Path, device: Device, stream: Any) -> None:
        from llmbuild.plugins.tensorrt import register
        from llmbuild.plugins.tensorrt.bindings import require_plugins

        module = require_plugins().module
        register()
        super().__init__(module, "TensorRT", engine, device, stream)
        self._open_contexts()


def make_log(module: Any) -> Any:
    """A logger that keeps the last errors."""

    class Log(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                self.errors = [*self.errors[-3:], message]

        def reason(self) -> str:
            return "; ".join(self.errors) or "it gives no reason"

    return Log()
