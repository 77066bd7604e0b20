"""enqueue with the descriptors of TensorRT's bindings and real addresses, against the reference op.

By default the memory is the host's and the kernels are interpreted; `test_enqueue_gpu.py` does the same on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmbuild.builder.targets.tensorrt.plugin_kernels import compile_kernels, plugin_program
from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt.form import PluginForm
from support.interpreted_kernels import InterpretedKernels
from support.plugin_bindings import plugin_module
from support.plugin_node import Node
from support.plugin_steps import FORMS, check, form, steps

SM = 90
FEW = 2  # processors: each sequence's keys are split in 3, not in 64 that the interpreter would take minutes for
WORKSPACE = 8 << 20
SLOW = ("groups", "head_24_16", "float16", "bfloat16", "fused", "fused_interleaved_rope_bfloat16")


def make_node(made: PluginForm) -> tuple[Node, InterpretedKernels]:
    loader = InterpretedKernels(SM)
    plugin = plugin_module.PagedAttention.of(made, compile_kernels(made, SM, processors=FEW), loader)
    loader.know(plugin_program(made, SM, processors=FEW)[1], plugin.opened.pack)
    return Node(plugin_module.trt, made, plugin, loader.own), loader


def workspace(node: Node) -> torch.Tensor:
    """As much as the plugin asks for, of NaN."""
    return torch.full((node.workspace_bytes(32, 4),), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in FORMS])
def test_steps_equal_the_reference(name: str) -> None:
    """Prefill in chunks, mixed steps and decode over a cache that earlier steps wrote."""
    made = form(**FORMS[name])
    node, loader = make_node(made)
    kinds = []
    for step in steps(made):
        out = node.enqueue(step, workspace(node))
        check(made, step, out)
        kinds.append(step.kind)
    assert kinds == ["mixed"] * 3 + ["decode"] * 2
    assert loader.launched.count("attention_prefill") == kinds.count("mixed")
    assert loader.launched.count("attention_decode") == kinds.count("decode")


def test_a_captured_step_can_be_run_again() -> None:
    """What enqueue launches depends on addresses and sizes alone: replayed, it computes anew from what lies there."""
    made = form(layout="fused", rotary_dim=16)
    node, loader = make_node(made)
    given = list(steps(made))
    for step in given[:-1]:
        node.enqueue(step, workspace(node))
    space, out = workspace(node), None

    def work() -> None:
        nonlocal out
        out = node.enqueue(given[-1], space)

    replay = loader.capture(work)
    assert out is not None and out.isnan().all()
    for _ in range(2):
        out.fill_(float("nan"))
        space.fill_(0xFF)
        replay()
        check(made, given[-1], out)


def test_layers_of_a_context_share_nothing_that_a_launch_reads() -> None:
    """A clone writes its own parameters: execution contexts of several threads may run at a time."""
    made = form()
    node, _ = make_node(made)
    attached = [node.plugin.attach_to_context(None) for _ in range(2)]
    first, second = (each.load()._steps[0].parameters for each in attached)
    assert first.pointers != second.pointers
    assert node.plugin.clone().form is made


def refuse(node: Node, change: Any) -> EngineError:
    step = next(iter(steps(node.form)))
    step.arrays = change(dict(step.arrays))
    with pytest.raises(EngineError) as info:
        node.enqueue(step, torch.zeros(WORKSPACE, dtype=torch.uint8))
    return info.value


@pytest.mark.parametrize(
    ("name", "cut", "what"),
    [
        ("k", slice(1, None), "k has 2 in dimension 0, not 3"),
        ("cu_q_lens", slice(1, None), "cu_q_lens has 2 entries for 2 sequences, not one more"),
        ("seq_lens", slice(1, None), "seq_lens has 1 in dimension 0, not 2"),
    ],
)
def test_sizes_that_contradict_each_other(name: str, cut: slice, what: str) -> None:
    node, _ = make_node(form())
    error = refuse(node, lambda arrays: arrays | {name: arrays[name][cut].clone()})
    assert error.what == what and error.where == "PagedAttention of layer 3"


def test_a_block_table_of_another_width() -> None:
    node, _ = make_node(form())
    error = refuse(node, lambda a: a | {"block_tables": torch.cat([a["block_tables"]] * 2, 1)})
    assert error.what == "block_tables has 8 in dimension 1, not 4"


def test_a_cache_that_is_copied_is_refused() -> None:
    node, loader = make_node(form())
    step = next(iter(steps(node.form)))
    real = node.plugin.enqueue

    def elsewhere(a: Any, b: Any, inputs: Any, outputs: Any, *rest: Any) -> None:
        real(a, b, inputs, [outputs[0], outputs[1] + 256, outputs[2]], *rest)

    node.plugin.enqueue = elsewhere
    with pytest.raises(EngineError, match="key_pool goes in and comes out at different addresses") as info:
        node.enqueue(step, torch.zeros(WORKSPACE, dtype=torch.uint8))
    assert info.value.hint == "build with PreviewFeature.ALIASED_PLUGIN_IO_10_03, and bind one buffer to both"
    assert loader.launched == []


def test_kernels_for_another_gpu() -> None:
    made = form()
    plugin = plugin_module.PagedAttention.of(made, compile_kernels(made, SM), InterpretedKernels(89))
    with pytest.raises(EngineError, match="kernels are for SM 90, this GPU is SM 89") as info:
        plugin.attach_to_context(None)
    assert info.value.hint == "convert the model again with --sm 89"
