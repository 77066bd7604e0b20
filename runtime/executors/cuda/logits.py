"""Brings rows of logits to the host, as float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmbuild.engine.launch_plan import ITEM_BYTES, LaunchPlan
from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda.driver import Device, HostMemory
from llmbuild.runtime.executors.cuda.noise import from_bfloat16

STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class LogitsReader:
    """Copies the plan's logits into page-locked memory, which grows with the rows that are asked for.

    Args:
        address: Of the logits on the GPU, [L, plan.logits_columns] of plan.logits_dtype.
        vocab_size: Columns that mean something.

    Raises:
        EngineError: Logits of a dtype that is not read.
    """

    def __init__(self, plan: LaunchPlan, device: Device, address: int, vocab_size: int) -> None:
        if plan.logits_dtype not in STORED:
            raise EngineError(f"the launch plan's logits are {plan.logits_dtype}", hint="convert the model again")
        self._device = device
        self._address = address
        self._dtype = plan.logits_dtype
        self._columns = plan.logits_columns
        self._kept = min(vocab_size, plan.logits_columns)
        self._row_bytes = plan.logits_columns * ITEM_BYTES[plan.logits_dtype]
        self._host: HostMemory | None = None

    def fetch(self, rows: int, stream: Any) -> None:
        """Put the copy of the first `rows` rows into the stream."""
        size = rows * self._row_bytes
        if self._host is None or len(self._host.bytes) < size:
            if self._host is not None:
                self._device.synchronize(stream)
                self._device.free_host(self._host)
            self._host = self._device.allocate_host(size)
        if size:
            self._device.download(self._host.address, self._address, size, stream)

    def array(self, rows: int) -> npt.NDArray[np.float32]:
        """Return float32 [rows, V], once the stream has passed the last `fetch`; valid until the next one."""
        assert self._host is not None, "nothing was fetched"
        stored = self._host.bytes[: rows * self._row_bytes].view(STORED[self._dtype])
        kept = stored.reshape(rows, self._columns)[:, : self._kept]
        if self._dtype == "bfloat16":
            return from_bfloat16(kept)
        return kept.astype(np.float32, copy=False)

    def close(self) -> None:
        if self._host is not None:
            self._device.free_host(self._host)
            self._host = None
