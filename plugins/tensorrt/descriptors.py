"""TensorRT's descriptions of tensors, compared with what a form says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt.form import PluginForm, Tensor

TRT_TYPES = {  # dtype -> member of TensorRT's DataType
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "int8": "INT8",
    "int32": "INT32",
}


def data_type(trt: Any, dtype: str) -> Any:
    """Return TensorRT's name of a dtype."""
    return getattr(trt.DataType, TRT_TYPES[dtype])


def fits(trt: Any, tensor: Tensor, description: Any) -> bool:
    """Whether a PluginTensorDesc has the tensor's type, row after row."""
    same = description.type == data_type(trt, tensor.dtype)
    return bool(same and description.format == trt.TensorFormat.LINEAR)


def step_sizes(form: PluginForm, dims: Sequence[Sequence[int]], where: str) -> tuple[int, int]:
    """Return (tokens, sequences) of a step, from the dimensions of the node's inputs.

    Raises:
        EngineError: A dimension is not what the form says, or tensors that share one do not agree.
    """
    known: dict[str, int] = {}
    if len(dims) != len(form.inputs):
        raise EngineError(f"{len(dims)} inputs, not {len(form.inputs)}", where=where)
    for tensor, given in zip(form.inputs, dims, strict=True):
        if len(given) != len(tensor.dims):
            raise EngineError(f"{tensor.name} has {len(given)} dimensions, not {len(tensor.dims)}", where=where)
        for axis, (wanted, size) in enumerate(zip(tensor.dims, given, strict=True)):
            if isinstance(wanted, int):
                expected = wanted
            else:
                expected = known.setdefault(wanted, int(size))
            if expected != size:
                raise EngineError(f"{tensor.name} has {size} in dimension {axis}, not {expected}", where=where)
    if known["B1"] != known["B"] + 1:
        raise EngineError(f"cu_q_lens has {known['B1']} entries for {known['B']} sequences, not one more", where=where)
    return known["T"], known["B"]


def sizes_of(dims: Any) -> list[int]:
    """Return TensorRT's Dims as a list: they have a length and items, yet are no sequence."""
    return [int(dims[axis]) for axis in range(len(dims))]
