"""In the place of the full TensorRT, for the process that builds: tensorrt-rtx, whose networks take no plugins.

All is the vendor's but what the other package alone has. Plugin nodes are made as the full parser makes them, by the
registered creator from the node's attributes, asked what TensorRT asks, written and read again; then operators of equal
types stand in for them, so that the rest of the graph is parsed, strongly typed, and built with its profiles. The
engine is not opened, as that takes a GPU: what an inspector would say is made up here.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from types import SimpleNamespace
from typing import Any

import onnx
import quick_classes
import tensorrt_rtx as _rtx
from onnx import TensorProto, helper

quick_classes.add_to(_rtx)
globals().update({name: getattr(_rtx, name) for name in dir(_rtx) if not name.startswith("__")})
__version__ = "11.4.0.106"
LOG: dict[str, Any] = {"plugins": {}, "weights": {}, "bytes": {}, "flags": []}
KEPT: list[Any] = []  # fields point at their data
WEIGHT_FLAGS = ("STRIP_PLAN", "REFIT_IDENTICAL", "REFIT_INDIVIDUAL")  # tensorrt-rtx takes them with a GPU alone
TYPES = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16", "INT8": "INT8", "INT4": "INT4", "INT64": "INT64"}
KINDS = {"str": "CHAR", "int": "INT64", "float": "FLOAT64"}


class INetworkDefinition:
    add_plugin_v3 = None  # by which networks that take plugins are known


class Builder(_rtx.Builder):
    def create_builder_config(self) -> Any:
        config = super().create_builder_config()
        config.num_compute_capabilities = 1  # the full TensorRT builds for the GPU that is there
        config.set_compute_capability(_rtx.ComputeCapability.SM89, 0)
        return config

    def build_serialized_network_to_stream(self, network: Any, config: Any, writer: Any) -> bool:
        for name in WEIGHT_FLAGS:
            if config.get_flag(flag := getattr(_rtx.BuilderFlag, name)):
                LOG["flags"].append(name)
                config.clear_flag(flag)
        return super().build_serialized_network_to_stream(network, config, writer)  # type: ignore[no-any-return]


class OnnxParser:
    def __init__(self, network: Any, log: Any) -> None:
        self._parser = _rtx.OnnxParser(network, log)

    def load_model_proto(self, data: bytes) -> bool:
        model = onnx.load_from_string(data)
        types = {item.name: item.type.tensor_type.elem_type for item in model.graph.input}
        for tensor in model.graph.initializer:
            kind = TYPES.get(TensorProto.DataType.Name(tensor.data_type), "")
            LOG["weights"][tensor.name] = (kind, math.prod(tensor.dims))
        nodes = []
        for node in model.graph.node:
            if node.op_type in STAND_INS:
                make, stand_ins = STAND_INS[node.op_type]
                LOG["plugins"][node.name] = make(node)
                nodes += stand_ins(node, types)
            else:
                nodes.append(node)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        return self._parser.load_model_proto(model.SerializeToString())  # type: ignore[no-any-return]

    def load_initializer(self, name: str, address: int, size: int) -> bool:
        LOG["bytes"][name] = ctypes.string_at(address, size)
        return self._parser.load_initializer(name, address, size)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def make_plugin(node: onnx.NodeProto) -> dict[str, Any]:
    """Make the plugin of a node in both phases; return what was found."""
    creator, given = creator_of(node)
    plugin = creator.create_plugin(node.name, given, _rtx.TensorRTPhase.BUILD)
    types = [getattr(_rtx.DataType, kind) for kind in input_types(plugin)]
    outputs = plugin.get_output_data_types(types)
    again = creator.create_plugin(node.name, plugin.get_fields_to_serialize(), _rtx.TensorRTPhase.RUNTIME)
    assert again.form == plugin.form and again.opened.digest == plugin.opened.digest
    return {"outputs": [kind.name for kind in outputs], "sm": again.opened.sm, "layer": again.form.layer}


def make_stored(node: onnx.NodeProto) -> dict[str, Any]:
    """Make the plugin of a node whose kernel is stored; return what was found."""
    creator, given = creator_of(node)
    request = quick_classes.QuickPluginCreationRequest.STRICT_AOT
    plugin = creator.create_plugin(node.op_type, "llmbuild", given, _rtx.TensorRTPhase.BUILD, request)
    types = [getattr(_rtx.DataType, kind) for kind in input_types(plugin)]
    outputs = plugin.get_output_data_types(types, [len(tensor.dims) for tensor in plugin.form.inputs])
    assert len(outputs) == plugin.get_num_outputs() == len(node.output) and len(types) == len(node.input)
    symbol, code = plugin.get_kernel([], [])
    assert f".entry {symbol}(".encode() in code
    return {"outputs": [kind.name for kind in outputs], "kernel": symbol, "layer": plugin.form.layer}


def creator_of(node: onnx.NodeProto) -> tuple[Any, Any]:
    """Return the registered creator of a node, and its attributes as fields, as the parser makes them."""
    import numpy as np

    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert given.pop("aot", 0) == (node.op_type != "PagedAttention")
    version, namespace = given.pop("plugin_version").decode(), given.pop("plugin_namespace").decode()
    creator = _rtx.get_plugin_registry().get_creator(node.op_type, version, namespace)
    fields = []
    for name, value in given.items():
        plain = value.decode() if isinstance(value, bytes) else value
        kind = getattr(_rtx.PluginFieldType, KINDS[type(plain).__name__])
        data = value if isinstance(value, bytes) else np.array([value])
        KEPT.append(data)
        fields.append(_rtx.PluginField(name, data, kind))
    return creator, _rtx.PluginFieldCollection(fields)


def input_types(plugin: Any) -> list[str]:
    from llmbuild.plugins.tensorrt.descriptors import TRT_TYPES

    return [TRT_TYPES[tensor.dtype] for tensor in plugin.form.inputs]


def whole(node: onnx.NodeProto, types: dict[str, int]) -> list[onnx.NodeProto]:
    made = plus_sums(node, node.input[0], node.input[5:9], types[node.input[3]])
    return made + kept(node, node.input[3:5], node.output[1:3])


def store(node: onnx.NodeProto, types: dict[str, int]) -> list[onnx.NodeProto]:
    types.update(zip(node.output, (types[name] for name in node.input[2:4]), strict=True))
    made = plus_sums(node, node.input[2], node.input[4:5], types[node.input[2]])
    return made + kept(node, node.input[3:4], node.output[1:])


def attend(node: onnx.NodeProto, types: dict[str, int]) -> list[onnx.NodeProto]:
    return plus_sums(node, node.input[0], node.input[3:6], types[node.input[1]])


def kept(node: onnx.NodeProto, pools: Any, outputs: Any) -> list[onnx.NodeProto]:
    """The pools as they are."""
    pairs = zip(pools, outputs, strict=True)
    return [helper.make_node("Identity", [pool], [out], name=f"{node.name}.{pool}") for pool, out in pairs]


def plus_sums(node: onnx.NodeProto, base: str, paging: Any, kind: int) -> list[onnx.NodeProto]:
    """The first output: a tensor plus the sum of all that paging says."""
    made = []
    total = ""
    for name in paging:
        part = f"{node.name}.{name}"
        made.append(helper.make_node("ReduceSum", [name], [part], name=part, keepdims=0))
        if total:
            made.append(helper.make_node("Add", [total, part], [f"{part}.total"], name=f"{part}.total"))
        total = f"{part}.total" if total else part
    made.append(helper.make_node("Cast", [total], [f"{node.name}.cast"], name=f"{node.name}.cast", to=kind))
    made.append(helper.make_node("Add", [base, f"{node.name}.cast"], [node.output[0]], name=node.name))
    assert kind in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return made


STAND_INS = {
    "PagedAttention": (make_plugin, whole),
    "PagedStore": (make_stored, store),
    "PagedAttend": (make_stored, attend),
}


class Runtime:
    def __init__(self, log: Any) -> None: ...

    def deserialize_cuda_engine(self, engine: mmap.mmap) -> Any:
        assert isinstance(engine, mmap.mmap) and len(engine), "nothing was built, or it was read into memory"
        return Engine()


class Engine:
    num_optimization_profiles = 2

    def create_engine_inspector(self) -> Any:
        return self

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return 1000 + profile

    def get_engine_information(self, kind: Any) -> str:
        assert kind == _rtx.LayerInformationFormat.JSON
        return json.dumps({"Layers": [layer(name, found) for name, found in LOG["plugins"].items()]})


class Weights:
    def __init__(self, kind: Any, address: int, count: int) -> None:
        assert _rtx.Weights(kind, address, count).size == count
        self.address, self.count = address, count


class Refitter:
    """Asks for the weights that the real builder would take out, all of them at worst, and compares what comes."""

    def __init__(self, engine: Engine, log: Any) -> None:
        kinds = {name: each for name, each in LOG["weights"].items() if each[0]}
        if "REFIT_INDIVIDUAL" in LOG["flags"]:
            kinds = {name: each for name, each in kinds.items() if name in LOG["bytes"]}
        self._kinds, self._set = kinds, set[str]()

    def get_all_weights(self) -> list[str]:
        return list(self._kinds)

    def get_weights_prototype(self, name: str) -> Any:
        kind, count = self._kinds[name]
        return SimpleNamespace(dtype=getattr(_rtx.DataType, kind), size=count)

    def set_named_weights(self, name: str, weights: Any) -> bool:
        assert weights.count == self._kinds[name][1]
        self._set.add(name)
        given = LOG["bytes"].get(name, b"")  # the graph's own constants came with the graph
        return ctypes.string_at(weights.address, len(given)) == given

    def get_missing_weights(self) -> list[str]:
        return sorted(set(self._kinds) - self._set)

    def refit_cuda_engine(self) -> bool:
        return "STRIP_PLAN" in LOG["flags"] and not self.get_missing_weights()


def layer(name: str, found: dict[str, Any]) -> dict[str, Any]:
    outputs = [{"Name": str(at), "Format/Datatype": kind} for at, kind in enumerate(found["outputs"])]
    return {"Name": name, "LayerType": "PluginV3", "Inputs": [], "Outputs": outputs, "SM": found.get("sm")} | {
        "Metadata": f"[ONNX Layer: {name}]"
    }
