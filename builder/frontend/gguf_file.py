"""A GGUF file's metadata and tensor table, with errors that name what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from llmbuild.errors import ModelError, UnsupportedError


class GGUFFile:
    """Metadata by key and tensors by name, read through gguf-py without touching tensor data.

    Raises:
        ModelError: not a GGUF file, or truncated.
        UnsupportedError: one part of a split file, or big-endian.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelError(f"{str(path)!r} does not exist or is not a file")
        try:
            reader = _fast_reader(path)
        # gguf-py checks nothing but the magic: a cut file shows as arrays that are too short.
        except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
            raise ModelError(
                f"{path.name} is truncated or not a GGUF file ({error})",
                where=str(path),
                hint="download the file again; it was probably cut short",
            ) from error
        if reader.byte_order != "I":
            raise UnsupportedError("the GGUF file is big-endian", where=str(path))
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        if int(self.get("split.count", 1)) > 1:
            raise UnsupportedError(
                "this is one part of a split GGUF file",
                where=str(path),
                hint="merge the parts with llama-gguf-split --merge",
            )

    @property
    def keys(self) -> list[str]:
        """All metadata keys, in the order of the file."""
        return list(self._fields)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value; floats come back as the shortest decimal that has the same float32 value."""
        field = self._fields.get(key)
        if field is None:
            return default
        value = field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"GGUF metadata lacks {key}", where=str(self.path))
        return value


def _fast_reader(path: Path) -> Any:
    """gguf-py's reader over a plain view of the mapped file: slicing `np.memmap` itself takes most of its time."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        @property  # type: ignore[override]
        def data(self) -> np.ndarray:
            return self._view

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._view = np.asarray(mapped)

    return Reader(path)
