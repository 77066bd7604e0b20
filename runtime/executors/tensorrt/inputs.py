"""What an execution takes and gives, at places that never move: a packed step's arrays, and logits on their way back.

page-locked | input_ids | position_ids | slot_mapping | block_tables | ...     each at a multiple of 256 bytes
GPU         | the same places |
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.cuda.driver import Device

ALIGNMENT = 256


class StepArea:
    """Args:
    batch, tokens: Most sequences, and tokens, of a step.
    stride: Blocks in a row of block tables.

    num_bytes: On the GPU, and on the host.
    """

    def __init__(self, *, batch: int, tokens: int, stride: int) -> None:
        counts = [tokens] * 3 + [batch * stride, batch, batch + 1, batch]
        begins = places(counts)
        self._places = dict(zip(StepInput._fields, begins, strict=True))
        self.num_bytes = begins[-1] + counts[-1] * 4

    def allocate(self, device: Device) -> None:
        self._device = device
        self._base, self._staged = device.allocate(self.num_bytes), device.allocate_host(self.num_bytes)

    def send(self, step: StepInput, stream: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Put the copy of a step into the stream; the step before must be done. Returns shapes and addresses."""
        shapes, addresses, end = {}, {}, 0
        for name, array in step._asdict().items():
            begin, data = self._places[name], np.ascontiguousarray(array, np.int32)
            end = begin + data.nbytes
            self._staged.bytes[begin:end] = data.reshape(-1).view(np.uint8)
            shapes[name], addresses[name] = data.shape, self._base + begin
        self._device.upload(self._base, self._staged.address, end, stream)
        return shapes, addresses

    def free(self) -> None:
        self._device.free(self._base)
        self._device.free_host(self._staged)


class LogitsArea:
    """Logits float32 [rows, V] on the GPU, at `address`, and page-locked memory that they are copied to.

    rows: At most.
    """

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_bytes = rows * vocab_size * 4

    def allocate(self, device: Device) -> None:
        self._device = device
        self.address, self._host = device.allocate(self.num_bytes), device.allocate_host(self.num_bytes)

    def fetch(self, rows: int, stream: Any) -> npt.NDArray[np.float32]:
        """Wait for the stream, and return its first `rows` rows; they are valid until the next `fetch`.

        Also without rows: the host memory of the inputs is written again by the next execution.
        """
        size = rows * self._vocab_size * 4
        if size:
            self._device.download(self._host.address, self.address, size, stream)
        self._device.synchronize(stream)
        logits: npt.NDArray[np.float32] = self._host.bytes[:size].view(np.float32)
        return logits.reshape(rows, self._vocab_size)

    def free(self) -> None:
        self._device.free(self.address)
        self._device.free_host(self._host)


def places(counts: list[int]) -> list[int]:
    """Return where arrays of so many int32 begin, each at a multiple of 256 bytes."""
    begins, end = [], 0
    for count in counts:
        begins.append(end)
        end += -(-4 * count // ALIGNMENT) * ALIGNMENT
    return begins
