"""A plugin's form as fields: what an ONNX node says, and what an engine keeps.

Both have the same names. ONNX gives integers and floats of 32 or 64 bits and text; engines hold int32, float32 and
text. What a layer does not have is 0 (window, softcap, rotary_dim), never left out: a missing field is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from llmbuild.errors import EngineError, nearest
from llmbuild.plugins.kernels.attention_shape import AttentionShape, KvScales
from llmbuild.plugins.tensorrt.field_data import bytes_of
from llmbuild.plugins.tensorrt.form import NAME, Layout, PluginForm, Role

Kind = Literal["int", "float", "text", "bytes"]
Value = int | float | str | bytes
VERSION = 1  # of the fields; rises when their meaning changes
TYPES: dict[Kind, tuple[str, ...]] = {
    "int": ("INT32", "INT64", "INT8", "INT16"),
    "float": ("FLOAT32", "FLOAT64"),
    "text": ("CHAR", "UNKNOWN"),
    "bytes": ("UNKNOWN", "CHAR"),
}
FORM: dict[str, Kind] = {
    "fields_version": "int",
    "layer": "int",
    "layout": "text",
    "heads": "int",
    "kv_heads": "int",
    "head_dim": "int",
    "value_dim": "int",
    "scale": "float",
    "window": "int",
    "softcap": "float",
    "sinks": "int",
    "alibi": "int",
    "rotary_dim": "int",
    "interleaved": "int",
    "dtype": "text",
    "kv_dtype": "text",
    "kv_scales": "text",
    "page": "int",
    "table_stride": "int",
}
# Kernels: a builder's node names them by hash, see `kernel_store`; an engine holds them.
BUILD: dict[str, Kind] = {"kernels": "text"}
ENGINE: dict[str, Kind] = {"program": "bytes", "pack": "bytes"}


class Field(NamedTuple):
    """type: name of a member of `PluginFieldType`. data: numpy array or bytes."""

    name: str
    type: str
    data: Any


def form_values(form: PluginForm) -> dict[str, Value]:
    """Return the fields of a form by name; FORM has their kinds. scale and softcap are rounded to float32."""
    shape = form.shape
    return {
        "fields_version": VERSION,
        "layer": form.layer,
        "layout": form.layout,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "value_dim": shape.value_dim,
        "scale": float(np.float32(shape.scale)),
        "window": shape.window or 0,
        "softcap": float(np.float32(shape.softcap or 0.0)),
        "sinks": int(shape.sinks),
        "alibi": int(shape.alibi),
        "rotary_dim": form.rotary_dim,
        "interleaved": int(form.interleaved),
        "dtype": shape.dtype,
        "kv_dtype": shape.kv_dtype,
        "kv_scales": shape.kv_scales,
        "page": shape.page,
        "table_stride": form.table_stride,
    }


def form_of(values: Mapping[str, Value], where: str, role: Role = "whole") -> PluginForm:
    """Return the form that fields describe. role: see `PluginForm`.

    Raises:
        EngineError: The fields are of another version, or contradict each other.
        ConfigError: No kernel computes this.
    """
    version = values["fields_version"]
    if version != VERSION:
        raise EngineError(
            f"fields of {NAME} in version {version!r}; this llmbuild reads version {VERSION}",
            where=where,
            hint="convert the model again with this version of llmbuild",
        )
    integer = {name: cast(int, values[name]) for name, kind in FORM.items() if kind == "int"}
    try:
        shape = AttentionShape(
            heads=integer["heads"],
            kv_heads=integer["kv_heads"],
            head_dim=integer["head_dim"],
            value_dim=integer["value_dim"],
            scale=cast(float, values["scale"]),
            dtype=cast(str, values["dtype"]),
            kv_dtype=cast(str, values["kv_dtype"]),
            kv_scales=cast(KvScales, values["kv_scales"]),
            page=integer["page"],
            window=integer["window"] or None,
            softcap=cast(float, values["softcap"]) or None,
            sinks=bool(integer["sinks"]),
            alibi=bool(integer["alibi"]),
        )
    except ValueError as error:
        raise EngineError(f"fields of {NAME} that cannot be: {error}", where=where) from None
    return PluginForm(
        shape,
        layer=integer["layer"],
        table_stride=integer["table_stride"],
        layout=cast(Layout, values["layout"]),
        rotary_dim=integer["rotary_dim"],
        interleaved=bool(integer["interleaved"]),
        role=role,
    )


def to_fields(values: Mapping[str, Value]) -> list[Field]:
    """Return values as fields, in the order given."""
    kinds = FORM | BUILD | ENGINE
    return [to_field(name, kinds[name], value) for name, value in values.items()]


def to_field(name: str, kind: Kind, value: Value) -> Field:
    if kind == "int":
        return Field(name, "INT32", np.array([value], np.int32))
    if kind == "float":
        return Field(name, "FLOAT32", np.array([value], np.float32))
    if kind == "text":
        return Field(name, "CHAR", cast(str, value).encode())
    return Field(name, "UNKNOWN", value)


def read_fields(fields: Iterable[Any], known: Mapping[str, Kind], where: str) -> dict[str, Value]:
    """Return the values of `PluginField`s.

    Args:
        known: Every field that has to be there, and no other.

    Raises:
        EngineError: A field is missing, unknown, given twice, or of another type.
    """
    found: dict[str, Value] = {}
    for field in fields:
        name = str(field.name)
        if name not in known:
            raise EngineError(f"unknown field {name!r} of {NAME}", where=where, hint=nearest(name, list(known)))
        if name in found:
            raise EngineError(f"the field {name!r} of {NAME} is given twice", where=where)
        found[name] = value_of(field, name, known[name], where)
    if missing := [name for name in known if name not in found]:
        raise EngineError(f"{NAME} has no field {', '.join(missing)}", where=where)
    return found


def value_of(field: Any, name: str, kind: Kind, where: str) -> Value:
    given = getattr(field.type, "name", str(field.type))
    if given not in TYPES[kind]:
        raise EngineError(f"the field {name!r} of {NAME} is {given}, not {' or '.join(TYPES[kind])}", where=where)
    if kind == "bytes":
        return bytes_of(field, where)
    if kind == "text":
        try:
            return bytes_of(field, where).rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            raise EngineError(f"the field {name!r} of {NAME} is no text", where=where) from None
    data = np.asarray(field.data)
    if data.size != 1:
        raise EngineError(f"the field {name!r} of {NAME} holds {data.size} numbers, not one", where=where)
    return int(data.reshape(-1)[0]) if kind == "int" else float(np.float32(data.reshape(-1)[0]))
