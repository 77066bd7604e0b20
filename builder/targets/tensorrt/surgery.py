"""onnx-graphsurgeon: attention nodes become nodes of the plugins. All else stays as it is, names too.

The plugin writes to its cache, so that the pools come out of it as well: `keys.3` goes in, `keys.3.out` comes out in
the same memory. Attributes of the node are the plugin's fields (`plugins/tensorrt/fields.py`); the kernels that they
name lie in `kernel_store` until the engine is built.

Where the engine is to store the kernels, a node becomes two: PagedStore makes `keys.3.out`, and PagedAttend takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import onnx

from llmbuild.builder.targets.base import Limits
from llmbuild.errors import ConfigError, UnsupportedError
from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.plugins.tensorrt import fields
from llmbuild.plugins.tensorrt.form import NAME, NAMES, NAMESPACE, STORED, VERSION, PluginForm, Role

DTYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}
POOLS, OPTIONAL = slice(3, 5), slice(9, 11)


class Operated(NamedTuple):
    """model: with plugin nodes. forms: of them, by the name of the node, which is the graph's and the layer's."""

    model: onnx.ModelProto
    forms: dict[str, PluginForm]


def table_stride(limits: Limits) -> int:
    """Return how many entries a block table has."""
    return -(-limits.max_seq_len // limits.block_size)


def add_plugins(
    model: onnx.ModelProto, limits: Limits, kernels: Callable[[PluginForm], str], *, stored: bool = False
) -> Operated:
    """Return the model with a plugin node for each attention node, or two whose kernels the engine stores.

    Args:
        kernels: Returns the hash of the kernels of a form, see `kernel_store.provide`. Called once for layers that
            differ in their index alone.

    Raises:
        UnsupportedError: Caches of a type that the plugin does not have; names all such nodes.
        ConfigError: onnx-graphsurgeon is missing, or no kernel computes a layer.
    """
    try:
        import onnx_graphsurgeon as gs
    except ImportError as error:
        raise ConfigError(
            "the tensorrt target needs onnx-graphsurgeon", where=str(error), hint="pip install 'llmbuild[tensorrt]'"
        ) from error
    element = {item.name: item.type.tensor_type.elem_type for item in model.graph.input}
    graph = gs.import_onnx(model)
    nodes = [node for node in graph.nodes if node.op == NAME]
    pools = {node.name: element.get(node.inputs[3].name, 0) for node in nodes}
    if strange := [f"{name} ({onnx.TensorProto.DataType.Name(e)})" for name, e in pools.items() if e not in DTYPES]:
        raise UnsupportedError(f"'tensorrt' has no KV cache of such a type: {', '.join(strange)}")
    hashes: dict[PluginForm, str] = {}
    forms: dict[str, PluginForm] = {}
    for node in nodes:
        whole = form_of(node, DTYPES[pools[node.name]], limits)
        made = (split if stored else join)(gs, graph, node)
        for role, each in made.items():
            form = replace(whole, role=role)
            alike = replace(form, layer=0)
            if alike not in hashes:
                hashes[alike] = kernels(alike)
            forms[each.name] = form
            set_attributes(each, form, hashes[alike])
    for item in graph.inputs:
        if item.name == "block_tables":
            item.shape = [item.shape[0], table_stride(limits)]
    return Operated(gs.export_onnx(graph, do_type_check=False), forms)


def form_of(node: Any, dtype: str, limits: Limits) -> PluginForm:
    """Return the form of an attention node, whose tensors are of one dtype."""
    given = node.attrs
    present = [bool(tensor.name) for tensor in node.inputs[OPTIONAL]] + [False, False]
    shape = AttentionShape(
        heads=given["q_heads"],
        kv_heads=given["kv_heads"],
        head_dim=given["key_width"],
        value_dim=given["value_width"],
        scale=given["scale"],
        dtype=dtype,
        kv_dtype=dtype,
        page=given["block_size"],
        window=given["window"] or None,
        softcap=given["softcap"] or None,
        sinks=present[0],
        alibi=present[1],
    )
    return PluginForm(shape, layer=given["layer"], table_stride=table_stride(limits))


def add_pools(gs: Any, graph: Any, node: Any) -> list[Any]:
    """Make the outputs of the graph by which a node's pools come out."""
    made = [gs.Variable(f"{pool.name}.out", dtype=pool.dtype, shape=pool.shape) for pool in node.inputs[POOLS]]
    graph.outputs.extend(made)
    return made


def join(gs: Any, graph: Any, node: Any) -> dict[Role, Any]:
    """Turn a node into PagedAttention: inputs that are absent go, pools come out."""
    node.outputs.extend(add_pools(gs, graph, node))
    node.inputs = [tensor for tensor in node.inputs if tensor.name]
    return {"whole": node}


def split(gs: Any, graph: Any, node: Any) -> dict[Role, Any]:
    """Turn a node into PagedStore and PagedAttend."""
    q, k, v, key_pool, value_pool, slot_mapping, *rest = node.inputs
    pools = add_pools(gs, graph, node)
    store = gs.Node(
        NAMES["store"],
        f"{node.name}.store",
        inputs=[k, v, key_pool, value_pool, slot_mapping],
        outputs=pools,
        domain=node.domain,
    )
    graph.nodes.insert(next(at for at, each in enumerate(graph.nodes) if each is node), store)
    node.op = NAMES["attend"]
    node.inputs = [q, *pools, *(tensor for tensor in rest if tensor.name)]
    return {"store": store, "attend": node}


def set_attributes(node: Any, form: PluginForm, kernels: str) -> None:
    """Give a plugin node its fields, and what the parser finds the plugin by."""
    node.attrs.clear()
    node.attrs.update(fields.form_values(form) | {"kernels": kernels})
    node.attrs.update(plugin_version=VERSION, plugin_namespace=NAMESPACE)
    if form.role in STORED:
        node.attrs["aot"] = 1  # by which the parser asks for a plugin with a stored kernel, or fails
