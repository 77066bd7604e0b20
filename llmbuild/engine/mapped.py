"""Files of an engine where they lie: mapped, so that gigabytes are not copied to the heap before they are read."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple


@contextlib.contextmanager
def mapped_file(path: Path) -> Iterator[mmap.mmap]:
    """Yield the content of a file that is not empty, read-only; pages are read when they are looked at."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, from its start on, and where its data begin.

    Raises:
        ValueError: It is none.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > os.fstat(file.fileno()).st_size - 8:
        raise ValueError("no safetensors file")
    return json.loads(file.read(length)), 8 + length


class Place(NamedTuple):
    """A tensor in memory. dtype: as safetensors names it, "BF16". address: of its first byte. size: in bytes."""

    dtype: str
    address: int
    size: int


class MappedWeights:
    """A safetensors file for those who read from addresses. They are valid as long as this object lives.

    The mapping is private and writable, which is what takes an address from Python; nobody writes, no page is copied.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._header, data = read_header(file)
            self._mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)) + data

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def place(self, name: str) -> Place:
        """Return where a tensor of the file lies."""
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        return Place(entry["dtype"], self._start + begin, end - begin)
