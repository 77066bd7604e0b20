"""TensorRT's descriptions of tensors, compared with what a form says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt.form import Dim, PluginForm, Tensor

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


def output_types(trt: Any, form: PluginForm, given: Sequence[Any]) -> list[Any]:
    """Return TensorRT's types of a node's outputs.

    Args:
        given: Those of its inputs.

    Raises:
        EngineError: They are others than the form says.
    """
    expected = [data_type(trt, tensor.dtype) for tensor in form.inputs]
    if list(given) != expected:
        named, wanted = (", ".join(kind.name for kind in kinds) for kinds in (given, expected))
        raise EngineError(f"inputs of the types {named}; the node takes {wanted}", where=form.where)
    return [data_type(trt, tensor.dtype) for tensor in form.outputs]


def output_shapes(trt: Any, form: PluginForm, given: Sequence[Any], values: Sequence[Any], builder: Any) -> list[Any]:
    """Return the DimsExprs of a node's outputs.

    Args:
        given: Those of its inputs.
        values: Of inputs that are shapes; a node has none.
        builder: TensorRT's IExprBuilder.

    Raises:
        EngineError: The inputs are too many or too few.
    """
    if len(given) != len(form.inputs) or values:
        count = f"{len(given)} inputs and {len(values)} shapes"
        raise EngineError(f"{count}; the node takes {len(form.inputs)} and none", where=form.where)
    named = named_dims(form, given)
    shapes = []
    for tensor in form.outputs:
        shape = trt.DimsExprs(len(tensor.dims))
        for axis, dim in enumerate(tensor.dims):
            shape[axis] = builder.constant(dim) if isinstance(dim, int) else named[dim]
        shapes.append(shape)
    return shapes


def named_dims(form: PluginForm, given: Sequence[Any]) -> dict[Dim, Any]:
    """Return the expressions of the dimensions that inputs have, by their names in the form: T, B."""
    named: dict[Dim, Any] = {}
    for tensor, dims in zip(form.inputs, given, strict=True):
        for axis, dim in enumerate(tensor.dims):
            named.setdefault(dim, dims[axis])
    return named


def step_sizes(form: PluginForm, dims: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return (tokens, sequences) of a step, from the dimensions of the node's inputs; PagedStore knows no sequences: 0.

    Raises:
        EngineError: A dimension is not what the form says, or tensors that share one do not agree.
    """
    where = form.where
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
    if "B" in known and known["B1"] != known["B"] + 1:
        raise EngineError(f"cu_q_lens has {known['B1']} entries for {known['B']} sequences, not one more", where=where)
    return known["T"], known.get("B", 0)


def sizes_of(dims: Any) -> list[int]:
    """Return TensorRT's Dims as a list: they have a length and items, yet are no sequence."""
    return [int(dims[axis]) for axis in range(len(dims))]
