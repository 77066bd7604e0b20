"""A GPU in numpy: the methods of `runtime/executors/cuda/driver.Device`, with memory that outlives nothing.

Addresses are made up, and every access is checked to lie in one allocation. What is put into a stream happens at once,
or is recorded while the stream is captured. Kernels are Python functions by symbol; others only leave a record.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from llmbuild.cuda.calls import CudaError
from llmbuild.cuda.kernels import Grid
from llmbuild.engine.cubin import Cubin, Launch
from llmbuild.runtime.executors.cuda.driver import OUT_OF_MEMORY, HostMemory

BASE = 0x7F00_0000_0000
GAP = 1 << 12


class Launched(NamedTuple):
    """parameters: the bytes that the kernel was given. stream: the fake's number of it."""

    symbol: str
    grid: Grid
    parameters: bytes


class FakeDevice:
    """kernels: functions (device, grid, parameters: bytes) by symbol."""

    def __init__(
        self,
        ordinal: int = 0,
        *,
        sm: int = 90,
        driver_version: int = 13000,
        total: int = 1 << 30,
        kernels: dict[str, Callable[[FakeDevice, Grid, bytes], None]] | None = None,
    ) -> None:
        self.ordinal, self.sm, self.driver_version = ordinal, sm, driver_version
        self.name = "Fake H1"
        self.shared_limit = 227 << 10
        self.total = total
        self.kernels = kernels or {}
        self.blocks: dict[int, np.ndarray] = {}
        self.host: dict[int, np.ndarray] = {}
        self.launched: list[Launched] = []
        self.loaded: list[str] = []
        self.uploads: list[tuple[int, int]] = []  # (address, bytes)
        self.graphs_launched: list[int] = []
        self.captures = 0
        self.open_handles: set[int] = set()
        self.closed = False
        self._next = BASE
        self._handles = 0
        self._capturing: list[Callable[[], None]] | None = None
        self._graphs: dict[int, list[Callable[[], None]]] = {}

    # What tests look at

    def view(self, address: int, num_bytes: int) -> np.ndarray:
        """Return a uint8 view of memory that must lie in one allocation."""
        for start, block in self.blocks.items():
            if start <= address and address + num_bytes <= start + len(block):
                return block[address - start : address - start + num_bytes]
        raise CudaError("access", "CUDA_ERROR_ILLEGAL_ADDRESS", f"{num_bytes} bytes at {address:#x}")

    @property
    def used(self) -> int:
        return sum(map(len, self.blocks.values()))

    # Device

    def make_current(self) -> None: ...

    def close(self) -> None:
        assert not self.blocks and not self.host and not self.open_handles, "something was not freed"
        self.closed = True

    def memory(self) -> tuple[int, int]:
        return self.total - self.used, self.total

    def allocate(self, num_bytes: int) -> int:
        if self.used + num_bytes > self.total:
            raise CudaError("cuMemAlloc", OUT_OF_MEMORY, "out of memory")
        address = self._next
        self._next += -(-max(1, num_bytes) // GAP) * GAP + GAP
        self.blocks[address] = np.full(max(1, num_bytes), 0xEE, np.uint8)
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]

    def allocate_host(self, num_bytes: int) -> HostMemory:
        array = np.full(max(1, num_bytes), 0xDD, np.uint8)
        self.host[array.ctypes.data] = array
        return HostMemory(array.ctypes.data, array)

    def free_host(self, memory: HostMemory) -> None:
        del self.host[memory.address]

    def _host_bytes(self, address: int, num_bytes: int) -> bytes:
        for start, block in self.host.items():
            if start <= address and address + num_bytes <= start + len(block):
                return ctypes.string_at(address, num_bytes)
        raise CudaError("access", "CUDA_ERROR_ILLEGAL_ADDRESS", "not page-locked")

    def _put(self, work: Callable[[], None]) -> None:
        if self._capturing is not None:
            self._capturing.append(work)
        else:
            work()

    def upload(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        def work() -> None:
            self.view(target, num_bytes)[:] = np.frombuffer(self._host_bytes(source, num_bytes), np.uint8)

        self.uploads.append((target, num_bytes))
        self._put(work)

    def upload_rows(self, target: int, source: int, width: int, height: int, pitch: int, stream: Any) -> None:
        for row in range(height):
            self.upload(target + row * pitch, source + row * pitch, width, stream)

    def download(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        def work() -> None:
            self._host_bytes(target, num_bytes)
            ctypes.memmove(target, self.view(source, num_bytes).tobytes(), num_bytes)

        self._put(work)

    def copy(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        def work() -> None:
            self.view(target, num_bytes)[:] = self.view(source, num_bytes).copy()

        self._put(work)

    def fill(self, target: int, value: int, num_bytes: int, stream: Any) -> None:
        def work() -> None:
            self.view(target, num_bytes)[:] = value

        self._put(work)

    def _handle(self) -> int:
        self._handles += 1
        self.open_handles.add(self._handles)
        return self._handles

    def stream(self) -> int:
        return self._handle()

    def free_stream(self, stream: int) -> None:
        self.open_handles.remove(stream)

    def synchronize(self, stream: int) -> None:
        assert self._capturing is None, "waiting inside a capture"

    def event(self, *, timing: bool = False) -> int:
        return self._handle()

    def free_event(self, event: int) -> None:
        self.open_handles.remove(event)

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, stream: int, event: int) -> None: ...

    def synchronize_event(self, event: int) -> None:
        assert event in self.open_handles and self._capturing is None

    def elapsed(self, start: int, end: int) -> float:
        return 1.0

    def load(self, cubin: Cubin) -> str:
        self.loaded.append(cubin.launch.symbol)
        return cubin.launch.symbol

    def launcher(self, kernel: str, launch: Launch, parameters: Any) -> Callable[[Grid, Any], None]:
        def run(grid: Grid, stream: Any) -> None:
            given = parameters.data.tobytes()  # copied at the launch, as the driver does

            def work() -> None:
                self.launched.append(Launched(kernel, grid, given))
                if kernel in self.kernels:
                    self.kernels[kernel](self, grid, given)

            self._put(work)

        return run

    def begin_capture(self, stream: int) -> None:
        assert self._capturing is None
        self._capturing = []

    def end_capture(self, stream: int) -> int:
        assert self._capturing is not None
        self.captures += 1
        graph = self._handle()
        self._graphs[graph], self._capturing = self._capturing, None
        return graph

    def abandon_capture(self, stream: int) -> None:
        self._capturing = None

    def launch_graph(self, graph: int, stream: int) -> None:
        self.graphs_launched.append(graph)
        for work in self._graphs[graph]:
            work()

    def free_graph(self, graph: int) -> None:
        self.open_handles.remove(graph)
        del self._graphs[graph]
