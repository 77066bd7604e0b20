"""One safetensors file: its header, checked against the file, and memory-mapped reads of one tensor at a time.

8 bytes      n bytes              the rest
|--------|----------------|--------------------------------|
n (u64)   JSON header      tensor data; offsets count from here
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llmbuild.builder.weights import piece_size, rows_at_once
from llmbuild.errors import ModelError
from llmbuild.quantization.blocks import BlockTensor

_MAX_HEADER = 100 << 20  # the format's own limit
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_TRUNCATED_HINT = "download the file again; it was probably cut short"


@dataclass(frozen=True)
class StoredTensor:
    """A `WeightExpr`: `size` bytes at `offset` of `file`, row-major, little-endian."""

    name: str
    file: Path
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block_format(self) -> None:
        return None

    def load(self) -> Tensor:
        """Map the tensor's pages copy-on-write, so that nothing is read before it is used or kept after it is freed."""
        if self.size == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        skip = self.offset - start
        with self.file.open("rb") as stream:
            pages = mmap.mmap(stream.fileno(), self.size + skip, access=mmap.ACCESS_COPY, offset=start)
        raw = torch.frombuffer(pages, dtype=torch.uint8, count=self.size, offset=skip)
        if raw.data_ptr() % self.dtype.itemsize:  # the format does not promise alignment
            raw = raw.clone()
        return raw.view(self.dtype).reshape(self.shape)

    def load_blocks(self) -> BlockTensor:
        raise TypeError(f"{self.name} is a plain tensor")

    def sources(self) -> frozenset[str]:
        return frozenset((self.name,))

    def pieces(self, elements: int) -> Iterator[Tensor]:
        """Map some rows at a time; their pages leave the process with them."""
        if not self.shape or self.size == 0:
            yield self.load()
            return
        step = rows_at_once(self.shape, elements)
        row = self.size // self.shape[0]
        for begin in range(0, self.shape[0], step):
            count = min(step, self.shape[0] - begin)
            shape = (count, *self.shape[1:])
            yield replace(self, offset=self.offset + begin * row, size=count * row, shape=shape).load()

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        return piece_size(self.shape, elements) * self.dtype.itemsize + mmap.ALLOCATIONGRANULARITY


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of `file` by name, without reading their data.

    Raises:
        ModelError: the file is truncated, longer than its header says, or not safetensors.
    """
    total = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(total - 8, _MAX_HEADER):
            raise ModelError(
                f"{file.name} is truncated or not a safetensors file: {total} bytes, header of {length}",
                where=str(file),
                hint=_TRUNCATED_HINT,
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ModelError(f"{file.name} has no valid safetensors header ({error})", where=str(file)) from None
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, file, 8 + length) for name, entry in header.items()}
    expected = max((tensor.offset + tensor.size for tensor in tensors.values()), default=8 + length)
    if total < expected:
        raise ModelError(
            f"{file.name} is truncated: {total} bytes, its header describes {expected}",
            where=str(file),
            hint=_TRUNCATED_HINT,
        )
    if total > expected:
        raise ModelError(f"{file.name} holds {total - expected} bytes that no tensor describes", where=str(file))
    return tensors


def _tensor(name: str, entry: dict, file: Path, base: int) -> StoredTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ModelError(
            f"tensor {name!r} has dtype {entry['dtype']}, which llmbuild cannot read",
            where=str(file),
            hint="known: " + ", ".join(sorted(_DTYPES)),
        )
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ModelError(
            f"tensor {name!r} of shape {list(shape)} and dtype {entry['dtype']} cannot occupy {end - begin} bytes",
            where=str(file),
        )
    return StoredTensor(name, file, base + begin, end - begin, shape, dtype)
