"""What a field holds, also where TensorRT's bindings return the first element of an array over and over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt.field_data import bytes_of, from_memory, reads_wrong
from support.plugin_bindings import trt

TEXTS = [b"none", b"a", b"separate", bytes(range(256)) * 40]


@pytest.mark.parametrize("content", TEXTS, ids=len)
@pytest.mark.parametrize("kind", ["CHAR", "UNKNOWN"])
def test_bytes_of_a_field(kind: str, content: bytes) -> None:
    field = trt.PluginField("name", content, getattr(trt.PluginFieldType, kind))
    kept = trt.PluginFieldCollection([field, field])
    assert [bytes_of(each, "here") for each in (field, *kept)] == [content] * 3


def test_memory_holds_what_right_bindings_return() -> None:
    """In all bindings, so that it is known to be there where it is needed."""
    for content in (*TEXTS, b""):
        assert from_memory(trt.PluginField("x", content, trt.PluginFieldType.CHAR), "here") == content


def test_bindings_that_read_arrays_wrong_are_noticed() -> None:
    class Wrong:
        def __init__(self, name: str, data: bytes, kind: Any) -> None:
            self.data = np.frombuffer(data[:1] * len(data), np.int8)

    class Right(Wrong):
        def __init__(self, name: str, data: bytes, kind: Any) -> None:
            self.data = np.frombuffer(data, np.int8)

    assert reads_wrong(Wrong, trt.PluginFieldType) and not reads_wrong(Right, trt.PluginFieldType)


def test_a_field_that_is_held_elsewhere() -> None:
    class Other:
        __slots__ = ("held",)
        name, size, type = "layout", -1, 6

    field = Other()
    field.held = b""
    with pytest.raises(EngineError, match="bindings cannot read the field 'layout' beside NumPy") as info:
        from_memory(field, "here")
    assert info.value.hint == "pip install 'tensorrt>=10.16'" and info.value.where == "here"
