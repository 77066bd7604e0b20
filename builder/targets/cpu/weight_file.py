"""`weights/cpu.safetensors`: every initializer of the ONNX graph, streamed one at a time, always the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE = 4096  # the data begin on a page, so that the runtime can map the file and use it in place
TYPE_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "int8": "I8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """One tensor to come: `load` computes it when the file is written. `storage` names its format in the report."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], npt.NDArray]
    storage: str

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass
class WeightFile:
    """Collects entries by name, then writes them. Peak memory is one tensor."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, name: str, entry: Entry) -> None:
        if name in self.entries:
            raise ValueError(f"weight {name!r} is added twice")
        self.entries[name] = entry

    def bytes_by_storage(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for entry in self.entries.values():
            total[entry.storage] = total.get(entry.storage, 0) + entry.num_bytes
        return dict(sorted(total.items()))

    def write(self, path: Path, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Write the safetensors file at `path`.

        Wide element types come first: without padding between tensors (the format allows none) every tensor is then
        aligned to its element size.
        """
        order = sorted(self.entries.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
        header: dict[str, dict[str, object]] = {}
        position = 0
        for name, entry in order:
            end = position + entry.num_bytes
            header[name] = {
                "dtype": TYPE_NAMES[entry.dtype.name],
                "shape": list(entry.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % PAGE)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for done, (name, entry) in enumerate(order):
                if progress is not None:
                    progress(done, len(order), name)
                array = np.asarray(entry.load(), order="C")
                if array.shape != entry.shape or array.dtype != entry.dtype:
                    got = f"{array.dtype} {array.shape}"
                    raise AssertionError(f"weight {name!r}: got {got}, said {entry.dtype} {entry.shape}")
                file.write(array.data.cast("B") if array.size else b"")
        if progress is not None:
            progress(len(order), len(order), "")
