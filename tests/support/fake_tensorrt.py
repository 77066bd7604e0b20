"""TensorRT's Python API as sessions and refitting use it, over objects that a test describes; nothing is computed.

engine = FakeEngine(asks={"w": ("BF16", 8)}, streamable=1000)
module = FakeTensorRT(engine)
"""

from __future__ import annotations

import ctypes
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DataType = enum.Enum("DataType", "FLOAT HALF BF16 FP8 INT64 INT32 INT8 INT4 UINT8 BOOL")


@dataclass
class FakeEngine:
    """asks: weights that it was stripped of, by name, type and count of each. folded: names that it misses besides.

    streamable: bytes of weights that may stay in host memory. activations: bytes of a context, and `scratch` more where
    weights are streamed. takes: whether it takes any budget.
    """

    asks: dict[str, tuple[str, int]] = field(default_factory=dict)
    folded: list[str] = field(default_factory=list)
    streamable: int = 0
    activations: int = 1 << 10
    scratch: int = 0
    takes: bool = True
    filled: dict[str, bytes] = field(default_factory=dict)
    num_optimization_profiles: int = 2
    events: list[str] = field(default_factory=list)
    strategies: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._budget = self.streamable
        self.contexts: list[FakeContext] = []

    @property
    def streamable_weights_size(self) -> int:
        return self.streamable

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        assert not self.contexts, "a budget is set before there are contexts"
        self.events.append(f"budget {budget}")
        if self.takes:
            self._budget = budget

    @property
    def device_memory_size_v2(self) -> int:
        return self.activations + (self.scratch if self._budget < self.streamable else 0)

    def get_tensor_shape(self, name: str) -> tuple[int, int]:
        assert name == "logits"
        return -1, 32

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(create_runtime_cache=lambda: self, set_runtime_cache=lambda cache: None)

    def serialize(self) -> bytes:
        return b"kernels"

    def create_execution_context(self, config: Any = None) -> FakeContext:
        self.events.append("context")
        self.strategies.append(config)
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class FakeContext:
    """does: what an execution does; it returns whether TensorRT is content."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.profile, self.memory = engine, -1, (0, 0)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.runs = 0
        self.does: Callable[[], bool] = lambda: True

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.runs += 1
        return self.does()


class Weights:
    def __init__(self, dtype: DataType, address: int, count: int) -> None:
        self.dtype, self.address, self.count = dtype, address, count


class Refitter:
    def __init__(self, engine: FakeEngine, log: Any) -> None:
        self._engine = engine
        engine.events.append("refit")

    def get_all_weights(self) -> list[str]:
        return list(self._engine.asks)

    def get_weights_prototype(self, name: str) -> Any:
        kind, count = self._engine.asks[name]
        return SimpleNamespace(dtype=DataType[kind], size=count)

    def set_named_weights(self, name: str, weights: Weights) -> bool:
        bits = {"FLOAT": 32, "HALF": 16, "BF16": 16, "INT4": 4}.get(weights.dtype.name, 8)
        self._engine.filled[name] = ctypes.string_at(weights.address, -(-weights.count * bits // 8))
        return True

    def get_missing_weights(self) -> list[str]:
        return self._engine.folded

    def refit_cuda_engine(self) -> bool:
        return self._engine.takes


class FakeTensorRT:
    """The module. opened: what engines were read from: kind of object, read-only, bytes."""

    __version__ = "11.4.0.106"
    DataType, Weights, Refitter = DataType, Weights, Refitter
    CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="WHOLE_GRAPH_CAPTURE")
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")
    LayerInformationFormat = SimpleNamespace(JSON="JSON")

    class ILogger:
        ERROR, INTERNAL_ERROR = "error", "internal"

    def __init__(self, engine: FakeEngine | None) -> None:
        self.opened: list[Any] = []
        opened = self.opened

        class Runtime:
            def __init__(self, log: Any) -> None: ...

            def deserialize_cuda_engine(self, content: Any) -> FakeEngine | None:
                view = memoryview(content)
                opened.append((type(content).__name__, view.readonly, len(view)))
                view.release()
                return engine

        self.Runtime = Runtime


def write_weights(path: Path, tensors: dict[str, tuple[str, bytes]]) -> None:
    """Write a safetensors file. tensors: type, "BF16", and content of each."""
    header, end = {}, 0
    for name, (dtype, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(content)], "data_offsets": [end, end + len(content)]}
        end += len(content)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(content for _, content in tensors.values()))
