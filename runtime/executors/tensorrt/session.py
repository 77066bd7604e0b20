"""All that is asked of TensorRT's runtimes: open an engine, make contexts, bind addresses, enqueue.

    session = PluginSession(...)    opened, and filled with weights if it was stripped of them
    session.prepare([0, 1], room)   weights divided between GPU and host, where the engine allows that; then contexts
    session.run(1, ...)             a step, in one of the contexts

Never executed where llmbuild is developed: TensorRT-RTX runs on no GPU there, the full TensorRT cannot be installed.
Kept so small that it can be read; calls are checked against the vendor's bindings and their types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.engine.mapped import MappedWeights, mapped_file
from llmbuild.errors import EngineError, LLMBuildError
from llmbuild.runtime.executors.tensorrt.checks import check_activations
from llmbuild.runtime.executors.tensorrt.log import make_log
from llmbuild.runtime.executors.tensorrt.streaming import fit_weights

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
        with mapped_file(engine) as content:
            self._engine: trt.ICudaEngine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            package = name.lower()
            raise EngineError(
                f"{name} {module.__version__} does not open the engine: {self._log.reason()}",
                where=f"{engine}, GPU {device.ordinal}: {device.name}",
                hint=f"convert the model again with the {package} installed here; `nvidia-smi` shows GPU and driver",
            )
        self._contexts: list[trt.IExecutionContext] = []

    def prepare(self, profiles: Sequence[int], room: int | None = None) -> int:
        """Make contexts, numbered from 0; once.

        Args:
            profiles: Of the engine, one for each context.
            room: Bytes of GPU memory for weights and activations, of an engine whose weights may stay in host memory.

        Returns:
            Bytes of GPU memory that weights and activations of such an engine take, perhaps later; 0 if `room` is None.

        Raises:
            EngineError: Activations do not fit, or TensorRT refuses.
        """
        places, taken = self._activations(len(profiles)), 0
        if room is not None:
            weights = fit_weights(self._engine, room, activations=places)
            taken = weights + places * self._engine.device_memory_size_v2
        for profile in profiles:
            context = self._context()
            if context is None or not context.set_optimization_profile_async(profile, int(self._stream)):
                raise EngineError(
                    f"{self._name} cannot prepare profile {profile} of the engine: {self._log.reason()}",
                    hint="free memory of the GPU, or load the engine with fewer kv_cache_blocks",
                )
            self._contexts.append(context)
        return taken

    def _activations(self, contexts: int) -> int:
        """Return how many places for activations there are: each context has its own."""
        return contexts

    def _context(self) -> trt.IExecutionContext | None:
        """Make one; None if TensorRT cannot. The two runtimes are asked in different ways."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return int(self._engine.get_tensor_shape("logits")[1])

    def run(self, context: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Put one execution into the stream.

        Args:
            context: Its number.
            shapes: Of every input.
            addresses: Of every input and output.

        Raises:
            LLMBuildError: TensorRT refuses.
        """
        self._log.forget()
        bound = self._contexts[context]
        done = all(bound.set_input_shape(name, shape) for name, shape in shapes.items())
        done = done and all(bound.set_tensor_address(name, address) for name, address in addresses.items())
        if not done:
            raise self._refused(context)
        self.run_again(context)

    def run_again(self, context: int) -> None:
        """Put the execution that a context ran last into the stream once more: same shapes, same addresses."""
        if not self._contexts[context].execute_async_v3(int(self._stream)):
            raise self._refused(context)

    def reason(self) -> str:
        """Return what TensorRT complained of last."""
        return str(self._log.reason())

    def _refused(self, context: int) -> LLMBuildError:
        return LLMBuildError(f"{self._name} did not run the step: {self.reason()}", where=f"context {context}")

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
        self._config = config

    def _context(self) -> trt.IExecutionContext | None:
        return self._engine.create_execution_context(self._config)

    def close(self) -> None:
        """Keep what was compiled, and let go of the engine."""
        if self._cache_file is not None:
            with contextlib.suppress(OSError):  # a cache: without it the next start takes longer
                self._cache_file.parent.mkdir(parents=True, exist_ok=True)
                self._cache_file.write_bytes(bytes(self._cache.serialize()))
        super().close()


class PluginSession(Session):
    """An engine of the full TensorRT. The plugin, if there is one, is registered before TensorRT looks for it.

    Its contexts never run at the same time and share one place for activations: a captured graph belongs to the state
    of its context, so that there is a context for each graph.

    Args:
        weights: The file with the weights of an engine that was stripped of them.
        plugin: Whether it calls the plugin; not if it stores the kernels of its nodes.

    Raises:
        ConfigError: TensorRT's version will not do.
    """

    def __init__(
        self, engine: Path, device: Device, stream: Any, weights: Path | None = None, *, plugin: bool = True
    ) -> None:
        from llmbuild.plugins.tensorrt import register
        from llmbuild.plugins.tensorrt.bindings import require_plugins
        from llmbuild.plugins.tensorrt.refit import refit

        module = require_plugins().module
        if plugin:
            register()
        super().__init__(module, "TensorRT", engine, device, stream)
        if weights is not None:
            refit(module, self._engine, self._log, MappedWeights(weights))
        self._device, self._memory = device, 0
        self._strategy = module.ExecutionContextAllocationStrategy.USER_MANAGED

    def _activations(self, contexts: int) -> int:
        return 1

    def _context(self) -> trt.IExecutionContext | None:
        size = self._engine.device_memory_size_v2  # at any profile
        if not self._memory:
            check_activations(self._device, size)
            self._memory = self._device.allocate(size)
        context = self._engine.create_execution_context(self._strategy)
        if context is not None:
            context.set_device_memory(self._memory, size)
        return context

    def close(self) -> None:
        super().close()
        if self._memory:
            self._device.free(self._memory)
