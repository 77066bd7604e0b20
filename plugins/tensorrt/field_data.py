"""The bytes of a plugin's field: an array of TensorRT's bindings, or, where those read it wrong, the memory itself.

The bindings of TensorRT 10.15 were built before NumPy 2, and beside it return the first element of an array over and
over: "none" comes as "nnnn". Numbers alone are right. With NumPy 1, or from 10.16 on, all is.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, cast

import numpy as np

from llmbuild.errors import EngineError

HELD = 2 * ctypes.sizeof(ctypes.c_void_p)  # where an object of the bindings holds the address of TensorRT's own


class PluginField(ctypes.Structure):
    """TensorRT's struct. length: in elements."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


def bytes_of(field: Any, where: str) -> bytes:
    """Return the data of a field of text or bytes.

    Args:
        field: A `PluginField` of the bindings.

    Raises:
        EngineError: The bindings read it wrong, and it is not where it should be.
    """
    kind, types = cast(Any, type(field)), cast(Any, type(field.type))
    return from_memory(field, where) if reads_wrong(kind, types) else np.asarray(field.data).tobytes()


@cache
def reads_wrong(kind: Any, types: Any) -> bool:
    """Whether bindings read arrays wrong. kind: their class of fields. types: their enumeration of field types."""
    return bool(np.asarray(kind("text", b"ab", types.CHAR).data).tobytes() != b"ab")


def from_memory(field: Any, where: str) -> bytes:
    """Return what a field points to; for the errors see `bytes_of`."""
    address = ctypes.c_void_p.from_address(id(field) + HELD).value
    held = PluginField.from_address(address) if address else PluginField()
    same = (held.type, held.length) == (int(field.type), field.size)  # asked before an address is followed
    if not same or held.name != field.name.encode():
        raise EngineError(
            f"TensorRT's bindings cannot read the field {field.name!r} beside NumPy {np.__version__}",
            where=where,
            hint="pip install 'tensorrt>=10.16'",
        )
    return ctypes.string_at(held.data, held.length) if held.length else b""
