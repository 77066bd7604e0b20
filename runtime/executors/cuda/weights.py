"""Brings the weight file onto the GPU: read in chunks by threads, copied from page-locked memory while more is read.

file     |  chunk 0  |  chunk 1  |  chunk 2  | ...      contiguous, CHUNK bytes each
staging  |  buffer 0 |  buffer 1 |  buffer 0 | ...      filled again once its copies are done
GPU      | tensor | pad | tensor | pad | ...            each tensor at a multiple of 256 bytes
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmbuild.engine.launch_plan import ALIGNMENT, DAMAGED, LaunchPlan
from llmbuild.engine.mapped import read_header
from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda.driver import Device, HostMemory

CHUNK = 64 << 20
READERS = 4  # threads that fill one chunk together: one alone copies slower from the page cache than the GPU takes
DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "U64": "uint64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
RANDOM_SCALE = 0.02  # standard deviation of random weights, near that of trained ones

Progress = Callable[[int, int], None]


class Stored(NamedTuple):
    """Bytes of a tensor in the file, and where they go: `offset` from the start of the weights on the GPU."""

    begin: int
    end: int
    offset: int


class Layout(NamedTuple):
    """offsets: of each weight on the GPU, by name. num_bytes: of all together."""

    offsets: dict[str, int]
    num_bytes: int


def layout(plan: LaunchPlan) -> Layout:
    """Return where each weight of a plan goes."""
    offsets, end = {}, 0
    for weight in plan.weights:
        offsets[weight.name] = end
        end += -(-weight.num_bytes // ALIGNMENT) * ALIGNMENT
    return Layout(offsets, end)


def stored_tensors(path: Path, plan: LaunchPlan) -> list[Stored]:
    """Read the header of a weight file and return its tensors that the plan names, in the file's order.

    Raises:
        EngineError: The file cannot be read, or lacks a tensor or holds it in another form than the plan's.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            header, start = read_header(file)
    except (OSError, ValueError) as error:
        raise EngineError(f"cannot read the weights: {error}", where=str(path), hint=DAMAGED) from None
    places = layout(plan).offsets
    found = []
    for weight in plan.weights:
        entry = header.get(weight.name)
        if entry is None:
            raise EngineError(f"the weights lack the tensor {weight.name}", where=str(path), hint=DAMAGED)
        held = (DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
        if held != (weight.dtype, weight.shape):
            raise EngineError(
                f"the tensor {weight.name} is {held[0]} {list(held[1])}, the launch plan wants "
                f"{weight.dtype} {list(weight.shape)}",
                where=str(path),
                hint=DAMAGED,
            )
        begin, end = (start + offset for offset in entry["data_offsets"])
        if end - begin != weight.num_bytes or end > size:
            raise EngineError(f"the tensor {weight.name} is truncated", where=str(path), hint=DAMAGED)
        found.append(Stored(begin, end, places[weight.name]))
    return sorted(found)


def upload(
    device: Device,
    path: Path,
    tensors: list[Stored],
    target: int,
    *,
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> None:
    """Copy tensors from the file to `target` on the GPU, and wait until they are there.

    Args:
        tensors: In the file's order.
        progress: Called with (bytes copied, bytes in all).

    Raises:
        EngineError: The file ends early or cannot be read.
    """
    if not tensors:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _Staging(device, chunk) as staging:
            _copy(staging, descriptor, tensors, target, progress)
    except OSError as error:
        raise EngineError(f"cannot read the weights: {error.strerror}", where=str(path), hint=DAMAGED) from error
    except EOFError:
        raise EngineError("the weight file is truncated", where=str(path), hint=DAMAGED) from None
    finally:
        os.close(descriptor)


def fill_with_noise(device: Device, plan: LaunchPlan, target: int, *, seed: int = 0, chunk: int = CHUNK) -> None:
    """Write small random numbers instead of weights, for benchmarks: the same block of numbers for all of a dtype."""
    from llmbuild.runtime.executors.cuda.noise import noise

    places = layout(plan).offsets
    with _Staging(device, chunk) as staging:
        for index, dtype in enumerate(sorted({weight.dtype for weight in plan.weights})):
            buffer = staging.free_buffer(index)
            block = noise(dtype, chunk, np.random.default_rng(seed), RANDOM_SCALE)
            buffer.bytes[: len(block)] = block
            for weight in (w for w in plan.weights if w.dtype == dtype):
                for start in range(0, weight.num_bytes, len(block)):
                    size = min(len(block), weight.num_bytes - start)
                    at = target + places[weight.name] + start
                    device.upload(at, buffer.address, size, staging.stream)
            staging.used(index)


class _Staging:
    """Two page-locked buffers, a stream, and the events after which each buffer may be filled again."""

    def __init__(self, device: Device, size: int) -> None:
        self.device = device
        self.size = size

    def __enter__(self) -> _Staging:
        self.stream = self.device.stream()
        self._buffers = [self.device.allocate_host(self.size) for _ in range(2)]
        self._events = [self.device.event() for _ in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        self.device.synchronize(self.stream)
        for buffer, event in zip(self._buffers, self._events, strict=True):
            self.device.free_host(buffer)
            self.device.free_event(event)
        self.device.free_stream(self.stream)

    def free_buffer(self, number: int) -> HostMemory:
        """Return the buffer for chunk `number`, once what it held before is copied."""
        self.device.synchronize_event(self._events[number % 2])
        return self._buffers[number % 2]

    def address(self, number: int) -> int:
        return self._buffers[number % 2].address

    def used(self, number: int) -> None:
        """The copies of chunk `number` are in the stream."""
        self.device.record(self._events[number % 2], self.stream)


def _copy(staging: _Staging, descriptor: int, tensors: list[Stored], target: int, progress: Progress | None) -> None:
    first, last = tensors[0].begin, max(t.end for t in tensors)
    whole = sum(t.end - t.begin for t in tensors)
    starts = range(first, last, staging.size)
    copied = 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="llmbuild-weights") as pool:

        def read(number: int) -> list[Future[None]]:
            buffer, start = staging.free_buffer(number), starts[number]
            return _read(pool, descriptor, buffer, start, min(staging.size, last - start))

        waiting = read(0)
        for number, start in enumerate(starts):
            for part in waiting:
                part.result()
            if number + 1 < len(starts):
                waiting = read(number + 1)
            buffer = staging.address(number)
            for begin, end, at in pieces(tensors, start, min(start + staging.size, last)):
                staging.device.upload(target + at, buffer + begin - start, end - begin, staging.stream)
                copied += end - begin
            staging.used(number)
            if progress is not None:
                progress(copied, whole)


def pieces(tensors: list[Stored], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, offset on the GPU) for each part of a tensor in the bytes [start, end) of the file.

    file     |--- a ---|------ b ------|- c -|
    chunk          [start              end)
    pieces         |a- |------ b ------|
    """
    for tensor in tensors:
        low, high = max(tensor.begin, start), min(tensor.end, end)
        if low < high:
            yield low, high, tensor.offset + low - tensor.begin


def _read(pool: ThreadPoolExecutor, descriptor: int, buffer: HostMemory, start: int, size: int) -> list[Future[None]]:
    """Fill a buffer with `size` bytes of the file from `start`, in parts side by side."""
    view = buffer.bytes.data
    share = -(-size // READERS)

    def fill(begin: int, end: int) -> None:
        while begin < end:
            count = os.preadv(descriptor, [view[begin:end]], start + begin)
            if count == 0:
                raise EOFError
            begin += count

    return [pool.submit(fill, at, min(at + share, size)) for at in range(0, size, share)]
