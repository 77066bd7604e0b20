"""Builds the ONNX graph node by node: names, constants, external weights, and the value of each FX node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx

from llmbuild.builder.ir import Program
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.weight_file import Entry, WeightFile, plain_entry

CONTRIB = "com.microsoft"  # onnxruntime's own fused operators
NATIVE = "llmbuild.cpu"  # ours, from cpu/native/

ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.uint8: TensorProto.UINT8,
    torch.int8: TensorProto.INT8,
    torch.bool: TensorProto.BOOL,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}

# Types of a weight's bits where numpy has none for them.
BIT_TYPES = {"bfloat16": TensorProto.BFLOAT16, "float8_e4m3fn": TensorProto.FLOAT8E4M3FN}

Value = str | tuple[str, ...]  # the ONNX name of an FX node's result, or one per output


@dataclass(frozen=True)
class Dialect:
    """Which operators a graph may hold.

    Args:
        opset: Version of the standard operators.
        ir_version: Of the file format.
        domains: Of other operators: CONTRIB, NATIVE.
        weights_file: What the graph says its external data lie in. Whoever reads it hands them over by name.
    """

    opset: int
    ir_version: int
    domains: tuple[str, ...]
    weights_file: str


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return numpy's dtype of the same numbers; ml_dtypes adds bfloat16 to it."""
    return np.dtype(ml_dtypes.bfloat16) if dtype is torch.bfloat16 else torch.zeros((), dtype=dtype).numpy().dtype


class Emitter:
    """The ONNX graph under construction.

    Attributes:
        program: What is being lowered.
        limits: What the engine is built for.
        dialect: Which operators the graph may hold.
        weights: Initializers that live in the weight file.
        values: ONNX name(s) of each FX node lowered so far.
        inputs: Graph inputs in order.
        outputs: Graph outputs in order.
    """

    def __init__(self, program: Program, limits: Limits, dialect: Dialect) -> None:
        self.program = program
        self.limits = limits
        self.dialect = dialect
        self.weights = WeightFile()
        self.values: dict[fx.Node, Value] = {}
        self.inputs: dict[str, onnx.ValueInfoProto] = {}
        self.outputs: dict[str, onnx.ValueInfoProto] = {}
        self.scope = ""
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._names: dict[str, int] = {}
        self._shared: dict[tuple[Any, ...], str] = {}

    @property
    def contrib(self) -> bool:
        """Whether the graph may use onnxruntime's own operators."""
        return CONTRIB in self.dialect.domains

    @property
    def native(self) -> bool:
        """Whether the graph may use the operators of cpu/native/ (a library beside the graph)."""
        return NATIVE in self.dialect.domains

    # ------------------------------------------------------------------------------------------------ operators
    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Append an operator with one output and return the output's name."""
        return self.ops(kind, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, outputs: int | Sequence[bool], domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """Append an operator and return its output names. `outputs`: how many, or which of them are wanted."""
        wanted = [True] * outputs if isinstance(outputs, int) else list(outputs)
        base = self._unique(self.scope or kind)
        names = tuple((base if len(wanted) == 1 else f"{base}.{i}") if want else "" for i, want in enumerate(wanted))
        attributes = {key: value for key, value in attributes.items() if value is not None}
        self._nodes.append(helper.make_node(kind, inputs, names, name=base, domain=domain, **attributes))
        return names

    def shared(self, key: tuple[Any, ...], make: Any) -> str:
        """Return `make()`, computed once per `key`: values every layer needs, such as a target shape."""
        if key not in self._shared:
            scope, self.scope = self.scope, str(key[0])
            self._shared[key] = make()
            self.scope = scope
        return self._shared[key]

    def loop(self, times: str, initial: str, dtype: int, body: Callable[[str, str], str]) -> str:
        """Append a Loop: total = body(turn, total), `times` times. Returns the last total.

        Args:
            times: int64 scalar.
            initial: The first total; the others have its shape.
            dtype: Element type of the total.
            body: Appends a turn's operators; may use any value that exists already. Turns count from 0.
        """
        turn, going, total = (self._unique(f"{self.scope}.{name}") for name in ("turn", "going", "total"))
        outer, self._nodes = self._nodes, []
        result = body(turn, total)
        still = self.op("Identity", going)
        inputs = [
            helper.make_tensor_value_info(turn, TensorProto.INT64, []),
            helper.make_tensor_value_info(going, TensorProto.BOOL, []),
            helper.make_tensor_value_info(total, dtype, None),
        ]
        outputs = [
            helper.make_tensor_value_info(still, TensorProto.BOOL, []),
            helper.make_tensor_value_info(result, dtype, None),
        ]
        graph = helper.make_graph(self._nodes, f"{self.scope}.body", inputs, outputs)
        self._nodes = outer
        return self.op("Loop", times, "", initial, body=graph)

    # ------------------------------------------------------------------------------------------------ constants
    def constant(self, value: Any, dtype: Any = None) -> str:
        """Return the name of a small constant that is stored in the graph itself. Equal constants are one."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._unique("constant")
            self._initializers[name] = numpy_helper.from_array(array, name)
            self._constants[key] = name
        return self._constants[key]

    @staticmethod
    def attribute_tensor(array: np.ndarray) -> TensorProto:
        return numpy_helper.from_array(array)

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def external(self, name: str, entry: Entry, kind: int | None = None, dims: tuple[int, ...] | None = None) -> str:
        """Declare an initializer whose data are written to the weight file under `name`.

        Args:
            kind: Its type in the graph, where the file only has its bits.
            dims: Its shape in the graph, where several elements share a byte of the file.
        """
        self.weights.add(name, entry)
        tensor = TensorProto()
        tensor.name = name
        of_bits = BIT_TYPES.get(entry.element or "")
        tensor.data_type = kind or of_bits or helper.np_dtype_to_tensor_dtype(entry.dtype)
        tensor.dims.extend(entry.shape if dims is None else dims)
        # Whoever reads the graph gets the mapped data by name; the location only says that there are none in here.
        tensor.data_location = TensorProto.EXTERNAL
        location = tensor.external_data.add()
        location.key, location.value = "location", self.dialect.weights_file
        self._initializers[name] = tensor
        return name

    def external_once(
        self, name: str, entry: Entry, kind: int | None = None, dims: tuple[int, ...] | None = None
    ) -> str:
        """Like `external`, for a weight that several nodes may declare."""
        return name if name in self.weights.entries else self.external(name, entry, kind, dims)

    def tensor(self, node: Any) -> str:
        """Return the ONNX name of an FX argument that is a single tensor: a node's value or a plain weight."""
        if node not in self.values:
            expr = self.program.weight_of(node)
            if expr is None:
                raise KeyError(f"{node} has no value yet")
            self.values[node] = self.external(node.name, plain_entry(expr))
        value = self.values[node]
        assert isinstance(value, str)
        return value

    # ------------------------------------------------------------------------------------------- inputs, outputs
    def add_input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        if name not in self.inputs:
            self.inputs[name] = helper.make_tensor_value_info(name, dtype, shape)
        return name

    def add_output(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self.outputs[name] = helper.make_tensor_value_info(name, dtype, shape)
        return name

    def rename(self, old: str, new: str) -> None:
        """Give a value that an operator makes the name `new` (graph outputs have fixed names)."""
        for node in self._nodes:
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    if name == old:
                        names[i] = new

    def model(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            name,
            list(self.inputs.values()),
            list(self.outputs.values()),
            list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", self.dialect.opset)]
        opsets += [helper.make_opsetid(domain, 1) for domain in self.dialect.domains]
        version = self.dialect.ir_version
        return helper.make_model(graph, opset_imports=opsets, producer_name="llmbuild", ir_version=version)

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else f"{name}.{count}"
