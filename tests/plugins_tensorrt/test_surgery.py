"""The graph with plugin nodes, each replaced by its reference function, gives the oracle's logits in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from llmbuild.builder.oracle import Oracle
from llmbuild.builder.targets.base import Limits
from llmbuild.builder.targets.tensorrt.graph import lower
from llmbuild.builder.targets.tensorrt.reference import with_reference
from llmbuild.builder.targets.tensorrt.surgery import Operated, add_plugins, table_stride
from llmbuild.errors import UnsupportedError
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.plugins.tensorrt import fields
from llmbuild.plugins.tensorrt.form import PluginForm
from llmbuild.selftest.twins import PagedTwin, filled
from support.families import FAMILIES, MOE_FAMILIES
from support.packed_driver import drive, mixed_requests
from support.traced import optimized

pytest.importorskip("onnx_graphsurgeon")
BLOCKS = 64
LIMITS = Limits(max_batch_size=4, max_num_tokens=32, max_seq_len=40, block_size=8)
# Every form of attention: groups, one KV head, windows, softcaps, sinks, ALiBi, heads of two sizes, experts.
QUICK = ("llama", "mistral", "gemma2", "gpt_oss", "bloom", "minicpm3")
REST = sorted({*FAMILIES, *MOE_FAMILIES} - {*QUICK})


def named(form: PluginForm) -> str:
    return f"{form.shape.heads}"


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in REST)])
def test_plugin_nodes_give_the_oracles_logits(family: str) -> None:
    compare(family, stored=False)


@pytest.mark.parametrize(
    "family", ["mistral", "gpt_oss", *(pytest.param(f, marks=pytest.mark.slow) for f in (*QUICK, *REST))]
)
def test_two_nodes_a_layer_do_too(family: str) -> None:
    compare(family, stored=True)


def compare(family: str, *, stored: bool) -> None:
    """Prefill in chunks, mixed steps and decode over a cache that earlier steps wrote."""
    program = optimized(family)
    emitter = lower(program, LIMITS, target="tensorrt", paged=True)
    model, forms = add_plugins(emitter.model("plugins"), LIMITS, named, stored=stored)
    whole = filled(with_reference(model, forms), emitter)
    twin = PagedTwin(whole, blocks=BLOCKS, block_size=LIMITS.block_size, stride=table_stride(LIMITS))
    requests = mixed_requests(program.info.vocab_size)
    oracle, state = Oracle(program), PagedState(BLOCKS, LIMITS.block_size)
    expected = drive(lambda step: oracle.run(step, state).numpy(), requests, num_blocks=BLOCKS)
    found = drive(twin.run, requests, num_blocks=BLOCKS)
    for got, wanted in zip(found, expected, strict=True):
        assert np.abs(got - wanted).max() < 3e-5 * max(1.0, np.abs(wanted).max())


@pytest.fixture(scope="module")
def operated() -> tuple[onnx.ModelProto, Operated, list[PluginForm]]:
    """A model whose layers look back 6 tokens: before, after, and what kernels were asked for."""
    program = optimized("mistral")
    model = lower(program, LIMITS, target="tensorrt", paged=True).model("plugins")
    asked: list[PluginForm] = []

    def kernels(form: PluginForm) -> str:
        asked.append(form)
        return "abc"

    return model, add_plugins(model, LIMITS, kernels), asked


def test_all_but_attention_stays_as_it_is(operated: tuple) -> None:
    before, (after, forms), _ = operated
    kept = {node.name: (node.op_type, list(node.output)) for node in before.graph.node if node.name not in forms}
    now = {node.name: (node.op_type, list(node.output)) for node in after.graph.node}
    assert kept.items() <= now.items() and now.keys() == kept.keys() | forms.keys()
    assert [item.name for item in after.graph.input] == [item.name for item in before.graph.input]
    outside = [{t.name for t in m.graph.initializer if t.data_location == t.EXTERNAL} for m in (before, after)]
    assert outside[0] == outside[1] and outside[0]


def test_attributes_of_a_node_are_the_fields_of_the_plugin(operated: tuple) -> None:
    _, (after, forms), asked = operated
    nodes = [node for node in after.graph.node if node.op_type == "PagedAttention"]
    for layer, node in enumerate(nodes):
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert (given.pop("plugin_version"), given.pop("plugin_namespace")) == (b"1", b"llmbuild")
        assert given.pop("kernels") == b"abc"
        plain = {name: value.decode() if isinstance(value, bytes) else value for name, value in given.items()}
        assert fields.form_of(plain, "here") == forms[node.name]
        assert forms[node.name].layer == layer and forms[node.name].shape.window == 6
        assert list(node.output)[1:] == [f"keys.{layer}.out", f"values.{layer}.out"]
        assert "" not in node.input
    assert len(nodes) == 2 and [form.layer for form in asked] == [0]  # kernels of equal layers are compiled once
    shapes = {i.name: [d.dim_value or d.dim_param for d in i.type.tensor_type.shape.dim] for i in after.graph.input}
    assert shapes["block_tables"] == ["B", 5]


def test_a_cache_of_another_type_is_named(operated: tuple) -> None:
    before, _, _ = operated
    model = onnx.ModelProto()
    model.CopyFrom(before)
    for item in model.graph.input:
        if item.name == "keys.1":
            item.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    with pytest.raises(UnsupportedError, match=r"'tensorrt' has no KV cache of such a type: \w+ \(DOUBLE\)"):
        add_plugins(model, LIMITS, named)
