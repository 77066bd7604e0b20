"""The plugin class in TensorRT's own bindings: registration, fields, types, shapes, aliases, workspace, clones.

The bindings are those of `tensorrt-rtx`, which have the plugin classes and the registry of the full TensorRT. With
LLMBUILD_TENSORRT_BINDINGS they are others, see tools/tensorrt_bindings.py.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.tensorrt.graph import lower
from llmbuild.builder.targets.tensorrt.plugin_kernels import compile_kernels
from llmbuild.builder.targets.tensorrt.surgery import add_plugins
from llmbuild.errors import ConfigError, EngineError
from llmbuild.plugins.tensorrt import fields, kernel_store
from llmbuild.plugins.tensorrt.form import PluginForm
from llmbuild.plugins.tensorrt.program import KernelSet, PluginProgram
from support.plugin_bindings import HAS_LIBRARY, plugin_module, trt
from support.plugin_node import description, dynamic
from support.plugin_steps import FORMS, form
from support.traced import optimized

SM = 90
SIZES = {"T": 40, "B": 5, "B1": 6, "S": 96}


@cache
def kernels_of(made: PluginForm) -> KernelSet:
    return compile_kernels(made, SM, processors=2)


def make(made: PluginForm) -> Any:
    return plugin_module.PagedAttention.of(made, kernels_of(made))


def node_fields(made: PluginForm, **changes: Any) -> list[fields.Field]:
    """The fields of an ONNX node; None leaves one out."""
    values = {**fields.form_values(made), "kernels": kernel_store.provide(kernels_of(made)), **changes}
    return fields.to_fields({name: value for name, value in values.items() if value is not None})


def create(given: list[fields.Field], phase: str = "BUILD") -> Any:
    collection = plugin_module.field_collection(given)
    return creator().create_plugin("layer 3", collection, getattr(trt.TensorRTPhase, phase))


@cache
def creator() -> Any:
    return plugin_module.PagedAttentionCreator()


@pytest.mark.skipif(not HAS_LIBRARY, reason="the registry lies in TensorRT's library")
def test_importing_the_package_registers_the_plugin() -> None:
    """In a process of its own: the registry of this one has it already."""
    code = (
        "import llmbuild.plugins.tensorrt as package\n"
        "from llmbuild.plugins.tensorrt.bindings import bindings\n"
        "registry = bindings().module.get_plugin_registry()\n"
        "found = registry.get_creator('PagedAttention', '1', 'llmbuild')\n"
        "assert found is package.register() is package.register(), found\n"
        "package.register.cache_clear()\n"
        "try:\n    package.register()\n"
        "except Exception as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("TensorRT has another plugin llmbuild::PagedAttention, version 1, already")


def test_fields_of_the_creator_are_those_of_a_node() -> None:
    made = creator()
    assert (made.name, made.plugin_version, made.plugin_namespace) == ("PagedAttention", "1", "llmbuild")
    assert [field.name for field in made.field_names] == [field.name for field in node_fields(form())]


@pytest.mark.parametrize("name", FORMS)
def test_a_node_survives_the_way_into_an_engine_and_back(name: str) -> None:
    made = form(**FORMS[name])
    built = create(node_fields(made))
    kept = built.get_fields_to_serialize()
    back = creator().create_plugin("layer 3", kept, trt.TensorRTPhase.RUNTIME)
    assert back.form == built.form == made
    assert back.opened.kernels == kernels_of(made)
    assert (back.plugin_name, back.plugin_version, back.plugin_namespace) == ("PagedAttention", "1", "llmbuild")
    assert back.num_outputs == len(made.outputs) == (5 if made.shape.kv_scales == "token" else 3)
    assert "heads=" in back.metadata_string and "window=" in back.metadata_string


def test_numbers_of_64_bits_are_taken_as_onnx_gives_them() -> None:
    given = node_fields(form(window=5, softcap=2.0))
    wide = {"INT32": ("INT64", np.int64), "FLOAT32": ("FLOAT64", np.float64)}
    changed = [
        fields.Field(field.name, wide[field.type][0], field.data.astype(wide[field.type][1]))
        if field.type in wide
        else field
        for field in given
    ]
    assert create(changed).form == form(window=5, softcap=2.0)


def test_scale_is_kept_as_float32() -> None:
    made = form(scale=0.1)
    assert create(node_fields(made)).form.shape.scale == float(np.float32(0.1))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"heads": None}, "PagedAttention has no field heads"),
        ({"fields_version": 2}, "fields of PagedAttention in version 2; this llmbuild reads version 1"),
        ({"kernels": "0" * 64}, "the node names kernels 000000000000..., which nobody provided"),
        ({"kv_heads": 0}, "fields of PagedAttention that cannot be: a size of"),
        ({"heads": 3, "kv_heads": 2}, "fields of PagedAttention that cannot be: 3 query heads cannot share 2"),
        ({"dtype": "int4"}, "fields of PagedAttention that cannot be: dtype 'int4' is none of"),
    ],
)
def test_fields_that_will_not_do(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(EngineError) as info:
        create(node_fields(form(), **changes))
    assert info.value.what.startswith(what) and info.value.where == "PagedAttention 'layer 3'"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda f: [*f, f[0]], "the field 'fields_version' of PagedAttention is given twice"),
        (lambda f: [*f, fields.Field("haeds", "INT32", np.zeros(1, np.int32))], "unknown field 'haeds'"),
        (
            lambda f: [f[0], fields.Field("layer", "FLOAT32", np.zeros(1, np.float32)), *f[2:]],
            "the field 'layer' of PagedAttention is FLOAT32, not INT32 or INT64",
        ),
        (
            lambda f: [f[0], fields.Field("layer", "INT32", np.zeros(2, np.int32)), *f[2:]],
            "the field 'layer' of PagedAttention holds 2 numbers, not one",
        ),
    ],
)
def test_fields_of_the_wrong_kind(change: Any, what: str) -> None:
    with pytest.raises(EngineError) as info:
        create(change(node_fields(form())))
    assert info.value.what.startswith(what)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"layout": "fused", "rotary_dim": 18}, "rotary_dim 18 is no even number up to head_dim, 16"),
        ({"rotary_dim": 16}, "rotary embedding is part of the plugin only where q, k and v are fused"),
        ({"layout": "mixed"}, "layout 'mixed' is none of separate, fused"),
        ({"kv_dtype": "int8"}, "a cache of int8 needs scales: kv_scales is none of layer, token"),
        ({"kv_scales": "layer"}, "a cache of float32 takes no scales: kv_scales is 'layer'"),
        (
            {"layout": "fused", "head_dim": 7, "dtype": "float16", "kv_dtype": "float16"},
            "values in the fused projection start at channel 21, not at a multiple of 16 bytes",
        ),
    ],
)
def test_forms_that_no_kernel_computes(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as info:
        form(**arguments)
    assert info.value.what == what and info.value.where == "PagedAttention of layer 3"


def test_an_engine_of_another_version() -> None:
    made = form()
    program, pack = kernels_of(made)
    newer = program.replace(b'"version":1', b'"version":2')
    with pytest.raises(EngineError, match="a plugin's program of version 2; this llmbuild reads version 1"):
        plugin_module.PagedAttention.of(made, KernelSet(newer, pack))
    for damaged in (b"", b"[]", program[:-9], program.replace(b'"scratch"', b'"sketch"')):
        with pytest.raises(EngineError, match="the plugin's program is damaged"):
            plugin_module.PagedAttention.of(made, KernelSet(damaged, pack))
    with pytest.raises(EngineError, match="truncated kernels"):
        plugin_module.PagedAttention.of(made, KernelSet(program, pack[:-100]))


def test_kernels_of_another_node() -> None:
    """Those of a node with sinks name an input that one without does not have."""
    with pytest.raises(EngineError, match="the plugin's program has no input 'sinks'"):
        plugin_module.PagedAttention.of(form(), kernels_of(form(sinks=True)))
    program, pack = kernels_of(form())
    with pytest.raises(EngineError, match="the plugin has no kernel stare"):
        plugin_module.PagedAttention.of(form(), KernelSet(program.replace(b'"store"', b'"stare"'), pack))


def test_types() -> None:
    kinds = trt.DataType
    made = make(form(**FORMS["int8_token_fused_rope"]))
    given = [kinds.FLOAT] * 3 + [kinds.INT8] * 2 + [kinds.INT32] * 4 + [kinds.FLOAT] * 2
    assert made.get_output_data_types(given) == [kinds.FLOAT, kinds.INT8, kinds.INT8, kinds.FLOAT, kinds.FLOAT]
    with pytest.raises(EngineError, match=r"inputs of the types HALF, .*; the node takes FLOAT, "):
        made.get_output_data_types([kinds.HALF, *given[1:]])


def test_each_tensor_has_one_type_and_lies_in_rows() -> None:
    made = form(**FORMS["float8_layer"])
    plugin, count = make(made), len(made.inputs)
    descriptions = [dynamic(trt, tensor, SIZES) for tensor in (*made.inputs, *made.outputs)]
    assert all(plugin.supports_format_combination(at, descriptions, count) for at in range(len(descriptions)))
    for at, each in enumerate(descriptions):
        right = each.desc.type
        each.desc.type = trt.DataType.BOOL
        assert not plugin.supports_format_combination(at, descriptions, count)
        each.desc.type, each.desc.format = right, trt.TensorFormat.CHW32
        assert not plugin.supports_format_combination(at, descriptions, count)
        each.desc.format = trt.TensorFormat.LINEAR
    assert not plugin.supports_format_combination(0, descriptions, count - 1)


@pytest.mark.parametrize("name", ["plain", "fused_rope", "int8_token_fused_rope"])
def test_the_cache_comes_out_where_it_went_in(name: str) -> None:
    made = form(**FORMS[name])
    plugin = make(made)
    names = [tensor.name for tensor in made.inputs]
    aliases = [plugin.get_aliased_input(output) for output in range(plugin.num_outputs)]
    assert aliases[0] == -1
    assert [names[at] for at in aliases[1:]] == [tensor.name for tensor in made.outputs[1:]]
    assert [tensor.name for tensor in made.outputs[1:3]] == ["key_pool", "value_pool"]


class Shapes:
    """What get_output_shapes works with. TensorRT alone can make dimensions: in their place are plain values."""

    @staticmethod
    def constant(value: int) -> int:
        return value


@pytest.mark.parametrize("name", ["plain", "head_24_16", "fused_rope", "int8_token_fused_rope"])
def test_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = form(**FORMS[name])
    monkeypatch.setattr(trt, "DimsExprs", lambda rank: [None] * rank)
    inputs = [[f"{t.name}.{axis}" if isinstance(d, str) else d for axis, d in enumerate(t.dims)] for t in made.inputs]
    found = make(made).get_output_shapes(inputs, [], Shapes())
    shape, first = made.shape, made.inputs[0].name
    assert found[0] == [f"{first}.0", shape.heads, shape.value_dim]
    assert found[1] == ["key_pool.0", shape.kv_heads, shape.head_dim]
    assert found[2] == ["key_pool.0", shape.kv_heads, shape.value_dim]
    assert found[3:] == ([["key_pool.0", shape.kv_heads]] * 2 if shape.kv_scales == "token" else [])
    with pytest.raises(EngineError, match="inputs and 0 shapes; the node takes"):
        make(made).get_output_shapes(inputs[1:], [], Shapes())


def test_workspace_is_the_most_that_any_step_needs() -> None:
    """What splits of keys need is largest where there are few sequences, and zero where a step is a chunk."""
    made = form(heads=8, kv_heads=4, head_dim=64, value_dim=64, layout="fused")
    plugin = plugin_module.PagedAttention.of(made, compile_kernels(made, SM))
    inputs = [dynamic(trt, tensor, SIZES) for tensor in made.inputs]
    found = plugin.get_workspace_size(inputs, [])
    program: PluginProgram = plugin.opened.program
    needs = [program.scratch_layout(40, sequences)[1] for sequences in range(1, 6)]
    assert found >= max(needs) and needs[0] > 0
    # partial and sums, B * heads * splits floats: 3 * 132 / 4 columns are more than the 64 splits there can be at most
    partial = max(b * 8 * min(64, -(-396 // (4 * b))) * 64 * 4 for b in range(1, 6))
    assert found == partial + -(-partial // 64 // 256) * 256 + 40 * 64 * 4 * (8 + 4)


def test_configuring_checks_dimensions() -> None:
    made = form()
    plugin = make(made)
    good = [dynamic(trt, tensor, SIZES) for tensor in made.inputs]
    plugin.configure_plugin(good, [])
    plugin.on_shape_change([each.desc for each in at_most(made)], [])
    with pytest.raises(EngineError, match="cu_q_lens has 9 entries for 5 sequences, not one more"):
        plugin.configure_plugin([dynamic(trt, tensor, SIZES | {"B1": 9}) for tensor in made.inputs], [])
    good[0].max = trt.Dims([40, 9, 16])
    with pytest.raises(EngineError, match="q has 9 in dimension 1, not 2"):
        plugin.configure_plugin(good, [])
    with pytest.raises(EngineError, match="8 inputs, not 9"):
        plugin.configure_plugin(good[1:], [])


def at_most(made: PluginForm) -> list[Any]:
    found = [dynamic(trt, tensor, SIZES) for tensor in made.inputs]
    for tensor, each in zip(made.inputs, found, strict=True):
        each.desc = description(trt, tensor, tuple(each.max))
    return found


def test_a_clone_is_another_plugin_of_the_same_kernels() -> None:
    plugin = make(form())
    twin = plugin.clone()
    assert twin is not plugin and twin.form is plugin.form and twin.opened is plugin.opened
    assert (twin.num_outputs, twin.timing_cache_id) == (plugin.num_outputs, plugin.timing_cache_id)
    for kind in ("CORE", "BUILD", "RUNTIME"):
        assert twin.get_capability_interface(getattr(trt.PluginCapabilityType, kind)) is twin
    assert plugin.get_valid_tactics() == []


def test_timing_is_shared_only_by_the_same_kernels() -> None:
    ids = {make(form(**FORMS[name])).timing_cache_id for name in ("plain", "window", "fused")}
    assert len(ids) == 3
    assert make(form()).timing_cache_id == make(form()).timing_cache_id


def test_fields_of_two_nodes_do_not_share_memory() -> None:
    """TensorRT reads them after get_fields_to_serialize has returned."""
    a, b = make(form(window=5)), make(form(window=7))
    first, second = a.get_fields_to_serialize(), b.get_fields_to_serialize()
    windows = [next(int(f.data[0]) for f in each if f.name == "window") for each in (first, second)]
    assert windows == [5, 7]


def test_nodes_of_a_graph_become_plugins() -> None:
    """From a traced model to plugins, as TensorRT's ONNX parser makes them: attributes of the node are the fields."""
    pytest.importorskip("onnx_graphsurgeon")
    program = optimized("gemma2", dtype=torch.bfloat16)
    limits = Limits(max_batch_size=4, max_num_tokens=32, max_seq_len=40, block_size=8)
    lowered = lower(program, limits, target="tensorrt", paged=True).model("plugins")
    model, forms = add_plugins(lowered, limits, lambda asked: kernel_store.provide(kernels_of(asked)))
    nodes = {node.name: node for node in model.graph.node if node.op_type == "PagedAttention"}
    assert nodes.keys() == forms.keys() and len(nodes) == len(program.kv_layers)
    for name, node in nodes.items():
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert given["plugin_namespace"].decode() == creator().plugin_namespace
        kinds = fields.FORM | fields.BUILD
        text = {key: value.decode() if isinstance(value, bytes) else value for key, value in given.items()}
        plugin = create(fields.to_fields({key: text[key] for key in kinds}))
        assert plugin.form == forms[name] and plugin.form.shape.dtype == "bfloat16"
        assert len(node.input) == len(plugin.form.inputs) and len(node.output) == plugin.num_outputs
