"""The graph of tensorrt-rtx, executed by onnxruntime, gives the oracle's logits; what cannot be lowered is named."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from llmbuild.builder.targets.tensorrt.graph import lower
from llmbuild.errors import UnsupportedError
from support.families import FAMILIES, MOE_FAMILIES
from support.rounding import WORST, check_rounded_alike
from support.tensorrt_graphs import LIMITS, Twin, differences, row_errors, twin_of
from support.traced import optimized

# Families of the default run: every form of attention, norm, position and mixture.
QUICK = (
    "llama",
    "mistral",
    "qwen3",
    "phi",
    "gemma2",
    "gpt2",
    "gptj",
    "bloom",
    "cohere",
    "minicpm3",
    "mixtral",
    "gpt_oss",
)
REST = sorted({*FAMILIES, *MOE_FAMILIES} - {*QUICK})


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in REST)])
def test_twin_gives_the_oracles_logits(family: str) -> None:
    """Prompts alone and padded, in chunks, beside decodes, over slots that earlier steps have written."""
    program = optimized(family)
    worst, largest = differences(program, twin_of(program))
    assert largest > 0.1
    assert worst < 3e-5 * max(1.0, largest)


@pytest.mark.parametrize(
    ("family", "recipe"), [("llama", "int4-wo-g32"), ("llama", "int8-wo-channel"), ("qwen3", "fp8")]
)
def test_twin_of_a_quantized_model(family: str, recipe: str) -> None:
    program = optimized(family, recipe)
    errors, largest = row_errors(program, twin_of(program))
    check_rounded_alike(errors / largest, worst=WORST if recipe == "fp8" else 3e-5)  # the others round weights alone


@pytest.fixture(scope="module")
def windowed() -> tuple:
    """A model whose layers look 6 tokens back, and its graph."""
    program = optimized("mistral")
    return program, lower(program, LIMITS, target="tensorrt-rtx", paged=False)


@pytest.mark.parametrize(
    "chunks",
    [(1,), (1, 1), (5, 1), (6, 1), (7, 1), (6, 6), (5, 7), (12, 1), (1, 6), (1,) * 9, (7, 1, 5, 1, 1), (40, 8)],
    ids=str,
)
def test_mask_at_the_edges(chunks: tuple[int, ...], windowed: tuple) -> None:
    """Lengths of 1, the window's edge, chunks that end before, at and behind it, and a slot that becomes full."""
    program, emitter = windowed
    random = np.random.default_rng(7)
    tokens = [random.integers(0, 256, count).tolist() for count in chunks]
    alone = [{"a": part} for part in tokens]
    beside = [{"a": part, "b": random.integers(0, 256, 2).tolist()} for part in tokens[:4]]
    for steps in (alone, beside):
        worst, largest = differences(program, Twin(emitter), steps)
        assert worst < 3e-5 * largest


def test_nodes_carry_the_names_of_the_graph(windowed: tuple) -> None:
    program, emitter = windowed
    calls = {node.name for node in program.graph.nodes if node.op == "call_function" and "linear" in node.name}
    names = {node.name.split(".")[0] for node in emitter.model("").graph.node}
    assert len(calls) == 9
    assert calls <= names


def test_graph_holds_no_weights_and_standard_operators_only(windowed: tuple) -> None:
    _, emitter = windowed
    model: onnx.ModelProto = emitter.model("")
    assert {node.domain for node in model.graph.node} == {""}
    assert max(len(tensor.raw_data) for tensor in model.graph.initializer) < 1024
    outside = {t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    assert outside == set(emitter.weights.entries)


def test_attention_of_tensorrt_is_one_node_a_layer(windowed: tuple) -> None:
    program, _ = windowed
    model = lower(program, LIMITS, target="tensorrt", paged=True).model("")
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    assert [found["layer"] for found in attributes] == [0, 1]
    assert attributes[0]["window"] == 6
    assert [item.name for item in model.graph.input][:2] == ["input_ids", "position_ids"]


def test_everything_that_cannot_be_lowered_is_named() -> None:
    """All nodes at once, each with its line in the model's code."""
    program = optimized("llama")
    linears = [n for n in program.graph.nodes if n.target is torch.ops.aten.linear.default]
    for node in linears[:2]:
        node.target = torch.ops.aten.erfinv.default
    with pytest.raises(UnsupportedError) as caught:
        lower(program, LIMITS, target="tensorrt-rtx", paged=False)
    assert "'tensorrt-rtx' cannot lower 2 node(s)" in caught.value.what
    assert all(node.name in caught.value.what for node in linears[:2])
    assert caught.value.what.count(".py:") == 2
