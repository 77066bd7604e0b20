"""`InputArea`: a step's arrays, laid out once, so that one copy brings them to places that never move.

    page-locked | input_ids | position_ids | ... | logits_indices | block_tables      each at a multiple of 256 bytes
    GPU         | the same layout, the same offsets |

Block tables lie last: a step copies the front and the rows of tables that it uses. Their rows keep the width of the
plan's limits, so that captured graphs may hold it as a constant. Two host areas take turns: the next step is written
while the last one's copy is still waiting for the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmbuild.engine.expressions import evaluate
from llmbuild.engine.launch_plan import ALIGNMENT, ITEM_BYTES, LaunchPlan
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.cuda.driver import Device

TABLES = "block_tables"
WHOLE_ROWS = 1 << 20  # bytes of tables up to which whole rows are copied: cheaper than row by row
NUMPY = {"float32": np.float32, "int32": np.int32, "int64": np.int64, "uint64": np.uint64, "uint8": np.uint8}


class InputArea:
    """Args:
    dummy_block: The block that padding rows read and write.
    """

    def __init__(self, plan: LaunchPlan, device: Device, *, dummy_block: int) -> None:
        self._device = device
        self._dummy = dummy_block
        self._block_size = plan.limits.block_size
        self._stride = plan.limits.table_stride
        self.offsets, self.num_bytes = input_layout(plan)
        self._tables_at = self.offsets.get(TABLES, self.num_bytes)
        self._base = device.allocate(self.num_bytes)
        self.addresses = {name: self._base + offset for name, offset in self.offsets.items()}
        self._host = [device.allocate_host(self.num_bytes) for _ in range(2)]
        self._sent = [device.event() for _ in self._host]
        self._arrays = [_views(plan, memory.bytes, self.offsets) for memory in self._host]
        self._counting = np.arange(plan.limits.max_batch_size + 1, dtype=np.int32)
        self._turn = 0
        self._rows = self._width = 0
        for memory in self._host:
            memory.bytes[:] = 0

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The host's arrays of the step being written, by input name, at their full sizes."""
        return self._arrays[self._turn]

    def write(self, step: StepInput, batch: int | None = None) -> None:
        """Write a step, once the copy of the step before last is done.

        batch: Sequences to pad a decode step to. Padding rows have one token, id 0, whose keys and values go to the
        dummy block; their logits mean nothing.
        """
        self._turn = (self._turn + 1) % len(self._host)
        self._device.synchronize_event(self._sent[self._turn])
        arrays = self.arrays
        sequences, rows = len(step.seq_lens), len(step.logits_indices)
        width = step.block_tables.shape[1]
        for name, array in arrays.items():  # a plan has those that its kernels read
            given = getattr(step, name)
            if name == TABLES:
                array.reshape(-1, self._stride)[:sequences, :width] = given
            else:
                array[: len(given)] = given
        self._rows, self._width = sequences, width
        if batch is not None and (batch > sequences or batch > rows):
            self._pad(arrays, sequences, rows, batch)

    def send(self, stream: Any) -> None:
        """Put the copy of what was written into the stream."""
        host, device = self._host[self._turn].address, self._device
        pitch = self._stride * 4
        used = self._rows * pitch
        if used <= WHOLE_ROWS:
            device.upload(self._base, host, min(self._tables_at + used, self.num_bytes), stream)
        else:
            device.upload(self._base, host, self._tables_at, stream)
            at = self._tables_at
            device.upload_rows(self._base + at, host + at, max(self._width, 1) * 4, self._rows, pitch, stream)
        device.record(self._sent[self._turn], stream)

    def close(self) -> None:
        for memory, event in zip(self._host, self._sent, strict=True):
            self._device.free_host(memory)
            self._device.free_event(event)
        self._device.free(self._base)

    def _pad(self, arrays: dict[str, npt.NDArray[Any]], sequences: int, rows: int, batch: int) -> None:
        """Write padding rows [sequences, batch) of a decode step, and logits rows [rows, batch)."""
        tail = slice(sequences, batch)
        for name, array in arrays.items():
            match name:
                case "slot_mapping":
                    array[tail] = self._dummy * self._block_size
                case "seq_lens":
                    array[tail] = 1
                case "cu_q_lens":
                    array[sequences + 1 : batch + 1] = self._counting[sequences + 1 : batch + 1]
                case "logits_indices":
                    array[rows:batch] = self._counting[rows:batch]
                case "block_tables":
                    array.reshape(-1, self._stride)[tail, 0] = self._dummy
                case _:  # ids and positions
                    array[tail] = 0
        self._rows = batch


def input_layout(plan: LaunchPlan) -> tuple[dict[str, int], int]:
    """Return (offset by name, bytes in all) of a plan's inputs at the plan's limits; block tables last."""
    offsets, end = {}, 0
    sizes = plan.limits.sizes()
    for each in sorted(plan.inputs, key=lambda each: each.name == TABLES):
        offsets[each.name] = end
        end += -(-evaluate(each.size, sizes) * ITEM_BYTES[each.dtype] // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _views(plan: LaunchPlan, memory: npt.NDArray[np.uint8], offsets: dict[str, int]) -> dict[str, npt.NDArray[Any]]:
    sizes, views = plan.limits.sizes(), {}
    for each in plan.inputs:
        dtype = np.dtype(NUMPY[each.dtype])
        start = offsets[each.name]
        views[each.name] = memory[start : start + evaluate(each.size, sizes) * dtype.itemsize].view(dtype)
    return views
