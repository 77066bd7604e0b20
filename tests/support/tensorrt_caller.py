"""`tensorrt_caller.cpp`, compiled against NVIDIA's headers and called: what TensorRT's C++ gets from our plugins."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from llmbuild.plugins.tensorrt.fields import Field
from llmbuild.plugins.tensorrt.form import PluginForm

HEADERS = os.environ.get("LLMBUILD_TENSORRT_HEADERS")
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "float8_e4m3fn": 6, "bfloat16": 7}
LETTERS = {"T": "T", "B": "B", "B1": "C", "S": "S"}  # B1: C is the letter after B
HELD = 2 * ctypes.sizeof(ctypes.c_void_p)  # where an object of the bindings holds the address of TensorRT's own


class FieldOfC(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("type", ctypes.c_int), ("length", ctypes.c_int))


class Fields(ctypes.Structure):
    """kept: what `fields` point to."""

    _fields_ = (("count", ctypes.c_int), ("fields", ctypes.POINTER(FieldOfC)))
    kept: Any


class Tensors(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("ranks", ctypes.POINTER(ctypes.c_int)),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("symbols", ctypes.c_char_p),
    )


@cache
def library() -> ctypes.CDLL:
    """Compile the caller. Headers: the folder `include` of github.com/NVIDIA/TensorRT, of the bindings' version."""
    triton = importlib.util.find_spec("triton")
    assert HEADERS is not None and triton is not None and triton.origin is not None
    cuda = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    made = Path(mkdtemp()) / "caller.so"
    source = Path(__file__).with_name("tensorrt_caller.cpp")
    options = ["-shared", "-fPIC", "-O1", "-std=c++17", "-Wno-deprecated-declarations", f"-I{HEADERS}", f"-I{cuda}"]
    subprocess.run([os.environ.get("CXX", "c++"), *options, str(source), "-o", str(made)], check=True)
    loaded = ctypes.CDLL(str(made))
    for name in ("ask_stored", "run_plugin", "kernel_code"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def address(made: Any) -> ctypes.c_void_p:
    """Return where TensorRT's own object of one of the bindings lies."""
    return ctypes.c_void_p(ctypes.c_void_p.from_address(id(made) + HELD).value)


def fields_of(given: Sequence[Field], types: Any) -> Fields:
    """Return fields as TensorRT's parser passes them. types: the bindings' PluginFieldType."""
    kept = [bytes(field.data) for field in given]
    made = (FieldOfC * len(given))()
    for one, field, data in zip(made, given, kept, strict=True):
        one.name, one.type = field.name.encode(), int(getattr(types, field.type))
        one.data = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)
        one.length = len(data) if field.type == "CHAR" else 1
    result = Fields(len(given), made)
    result.kept = kept
    return result


def tensors_of(form: PluginForm, sizes: dict[str, int]) -> Tensors:
    """Return the tensors of a node in a step of these sizes."""
    tensors = (*form.inputs, *form.outputs)
    dims = [dim for tensor in tensors for dim in tensor.dims]
    numbers = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
    symbols = bytes(ord(LETTERS[dim]) if isinstance(dim, str) else 0 for dim in dims)
    return Tensors(
        len(form.inputs),
        len(form.outputs),
        (ctypes.c_int * len(tensors))(*(TYPES[tensor.dtype] for tensor in tensors)),
        (ctypes.c_int * len(tensors))(*(len(tensor.dims) for tensor in tensors)),
        (ctypes.c_int64 * len(dims))(*numbers),
        symbols,
    )


def ask_stored(creator: Any, form: PluginForm, fields: Fields, request: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Return what a node whose kernel is stored tells; "code" is the kernel's."""
    given = tensors_of(form, sizes)
    names = (form.name.encode(), creator.plugin_namespace.encode())
    told = library().ask_stored(address(creator), *names, ctypes.byref(fields), request, ctypes.byref(given))
    return {**json.loads(told), "code": library().kernel_code().decode()}


def run_plugin(
    creator: Any, form: PluginForm, fields: Fields, sizes: dict[str, int], places: Sequence[int], room: tuple[int, int]
) -> dict[str, Any]:
    """Return what PagedAttention tells, and the code of its enqueue.

    Args:
        places: Addresses of inputs, then of outputs.
        room: Address and bytes of the workspace.
    """
    given, count = tensors_of(form, sizes), len(form.inputs)
    inputs = (ctypes.c_void_p * count)(*places[:count])
    outputs = (ctypes.c_void_p * len(form.outputs))(*places[count:])
    space = (ctypes.c_void_p(room[0]), ctypes.c_int64(room[1]))
    told = library().run_plugin(address(creator), ctypes.byref(fields), ctypes.byref(given), inputs, outputs, *space)
    found: dict[str, Any] = json.loads(told)
    return found
