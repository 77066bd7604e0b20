"""Everything this target asks of the CUDA driver, through cuda.bindings: memory, copies, kernels, graphs, events.

One `Device` is one GPU with its primary context. Addresses are plain integers; streams, events and graphs are opaque.
Every call is checked: a failure names the call and the driver's reason. Tests put an object with the same methods, and
numpy memory behind them, in its place (tests/support/fake_device.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmbuild.cuda.calls import (
    CudaError,
    checked,
    compute_capability,
    device_attribute,
    device_name,
    import_driver,
)
from llmbuild.cuda.kernels import KernelLauncher, Kernels
from llmbuild.engine.cubin import Cubin, Launch
from llmbuild.errors import DeviceError

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the null stream, which this target never uses
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class HostMemory(NamedTuple):
    """Page-locked host memory. address: of its first byte. bytes: uint8 view of it, valid until it is freed."""

    address: int
    bytes: npt.NDArray[np.uint8]


class Device:
    """A GPU, ready to be used by the thread that made it; other threads call `make_current` first.

    name: what the driver calls it. sm: compute capability, 90 for 9.0. driver_version: newest CUDA that the driver
    serves, 13000 for 13.0. shared_limit: bytes of shared memory that a block can ask for.

    Raises:
        DeviceError: cuda-bindings is missing, or there is no driver or no such GPU.
        CudaError: The driver refuses.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self._driver = driver = import_driver()
        self._start(ordinal)
        self._handle = self._call("cuDeviceGet", ordinal)
        self.ordinal = ordinal
        self.sm = compute_capability(driver, self._handle)
        self.name = device_name(driver, self._handle)
        self.driver_version: int = self._call("cuDriverGetVersion")
        self.shared_limit = device_attribute(driver, self._handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._context = self._call("cuDevicePrimaryCtxRetain", self._handle)
        self._kernels = Kernels(driver, self.shared_limit, self.name)
        self.make_current()

    def make_current(self) -> None:
        """Let the calling thread use this GPU. A fraction of a microsecond."""
        self._call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Unload the kernels and let go of the context. Memory, streams and graphs must be freed before."""
        self._kernels.unload()
        self._call("cuDevicePrimaryCtxRelease", self._handle)

    # Memory

    def memory(self) -> tuple[int, int]:
        """Return (free, all) bytes of the GPU's memory."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory on the GPU, a multiple of 256; its content is undefined."""
        return int(self._call("cuMemAlloc", max(1, num_bytes)))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def allocate_host(self, num_bytes: int) -> HostMemory:
        """Return page-locked host memory, which asynchronous copies need; its content is undefined."""
        size = max(1, num_bytes)
        address = int(self._call("cuMemHostAlloc", size, 0))
        view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        return HostMemory(address, view)

    def free_host(self, memory: HostMemory) -> None:
        self._call("cuMemFreeHost", memory.address)

    def upload(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Copy from page-locked host memory to the GPU, in the stream's order."""
        self._call("cuMemcpyHtoDAsync", target, source, num_bytes, stream)

    def upload_rows(self, target: int, source: int, width: int, height: int, pitch: int, stream: Any) -> None:
        """Copy the first `width` bytes of each of `height` rows that lie `pitch` bytes apart on both sides."""
        kinds = self._driver.CUmemorytype
        copy = self._driver.CUDA_MEMCPY2D()
        copy.srcMemoryType, copy.srcHost, copy.srcPitch = kinds.CU_MEMORYTYPE_HOST, source, pitch
        copy.dstMemoryType, copy.dstDevice, copy.dstPitch = kinds.CU_MEMORYTYPE_DEVICE, target, pitch
        copy.WidthInBytes, copy.Height = width, height
        self._call("cuMemcpy2DAsync", copy, stream)

    def download(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Copy from the GPU to page-locked host memory, in the stream's order."""
        self._call("cuMemcpyDtoHAsync", target, source, num_bytes, stream)

    def copy(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Copy within the GPU, in the stream's order."""
        self._call("cuMemcpyDtoDAsync", target, source, num_bytes, stream)

    def fill(self, target: int, value: int, num_bytes: int, stream: Any) -> None:
        """Set every byte to `value`, in the stream's order."""
        if num_bytes:
            self._call("cuMemsetD8Async", target, value, num_bytes, stream)

    # Streams and events

    def stream(self) -> Any:
        """Return a new stream; int(stream) is its handle."""
        return self._call("cuStreamCreate", _NON_BLOCKING)

    def free_stream(self, stream: Any) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: Any) -> None:
        """Wait until all that was put into the stream is done."""
        self._call("cuStreamSynchronize", stream)

    def event(self, *, timing: bool = False) -> Any:
        return self._call("cuEventCreate", 0 if timing else _NO_TIMING)

    def free_event(self, event: Any) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """Let the event happen when the stream gets here."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Let the stream wait for the event, without waiting here."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize_event(self, event: Any) -> None:
        """Wait for the event; one that was never recorded has happened."""
        self._call("cuEventSynchronize", event)

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two events with timing that have happened."""
        return float(self._call("cuEventElapsedTime", start, end))

    # Kernels

    def load(self, cubin: Cubin) -> Any:
        """Return the kernel of a cubin, ready to launch. The same code is loaded once.

        Raises:
            CudaError: The driver cannot load it.
            EngineError: It needs more shared memory than this GPU has.
        """
        return self._kernels.load(cubin)

    def launcher(self, kernel: Any, launch: Launch, parameters: Any) -> KernelLauncher:
        """Return what launches `kernel` with `parameters` (a ParameterBuffer)."""
        return self._kernels.launcher(kernel, launch, parameters)

    # Graphs

    def begin_capture(self, stream: Any) -> None:
        """Record what is put into the stream from now on, instead of running it."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: Any) -> Any:
        """Return what was recorded, ready to run: for `launch_graph`."""
        graph = self._call("cuStreamEndCapture", stream)
        try:
            return self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)

    def abandon_capture(self, stream: Any) -> None:
        """End a capture that failed half-way; what was recorded is lost, and so is the driver's complaint about it."""
        _, *made = self._driver.cuStreamEndCapture(stream)
        if made and made[0] is not None and int(made[0]):
            self._driver.cuGraphDestroy(made[0])

    def launch_graph(self, graph: Any, stream: Any) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def free_graph(self, graph: Any) -> None:
        self._call("cuGraphExecDestroy", graph)

    def _start(self, ordinal: int) -> None:
        """Start the driver and check that the GPU exists."""
        hint = "the cuda target runs on NVIDIA GPUs; `nvidia-smi` shows those that the driver sees"
        try:
            count = self._call("cuDeviceGetCount") if self._call("cuInit", 0) is None else 0
        except CudaError as error:
            raise DeviceError(f"no NVIDIA GPU can be used: {error.what}", where="CUDA driver", hint=hint) from error
        except Exception as error:  # cuda.bindings found no driver library; what it raises varies with its version
            raise DeviceError("no NVIDIA driver is installed", where=str(error) or None, hint=hint) from error
        if not 0 <= ordinal < count:
            found = f"there are {count}" if count != 1 else "there is 1"
            raise DeviceError(f"no GPU {ordinal}: {found}", where="CUDA driver", hint=hint)

    def _call(self, name: str, *arguments: Any) -> Any:
        return checked(self._driver, name, getattr(self._driver, name)(*arguments))


def capture(device: Device, stream: Any, put: Callable[[], None]) -> Any:
    """Return the graph of what `put` puts into the stream, ready to run; nothing of it runs now.

    Raises:
        CudaError: The driver cannot capture it.
        Exception: What `put` raises; the capture is abandoned then.
    """
    device.begin_capture(stream)
    try:
        put()
    except BaseException:
        device.abandon_capture(stream)
        raise
    return device.end_capture(stream)
