"""enqueue on a GPU: addresses of its memory, a stream of its own, and under capture in a CUDA graph.

The descriptors are made by TensorRT's bindings, and the class is the one that engines use. Its library plays no part
in enqueue, so where it is not installed the bindings alone will do, see tests/support/plugin_bindings.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from llmbuild.builder.targets.tensorrt.plugin_kernels import compile_kernels
from llmbuild.plugins.tensorrt.form import PluginForm
from support.packed_driver import Request
from support.plugin_bindings import plugin_module
from support.plugin_node import Node
from support.plugin_steps import FORMS, check, form, steps

pytestmark = pytest.mark.gpu

LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "scale": 128**-0.5, "page": 16}
HALF = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
LARGE: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, **HALF, "layout": "fused", "rotary_dim": 128},
    "llama_separate": {**LLAMA, **HALF},
    "gemma": {
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 256,
        "value_dim": 256,
        "scale": 0.0625,
        "page": 16,
        "softcap": 50.0,
        "window": 256,
        **HALF,
    },
    "gpt_oss": {
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 64,
        "value_dim": 64,
        "scale": 0.125,
        "page": 16,
        "window": 128,
        "sinks": True,
        **HALF,
    },
    "float8": {**LLAMA, "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "kv_scales": "layer"},
    "int8": {**LLAMA, "dtype": "bfloat16", "kv_dtype": "int8", "kv_scales": "token", "layout": "fused"},
}
LONG = [
    Request(range(304), prompt=300, chunks=(100, 60)),
    Request(range(6), prompt=1),
    Request(range(603), prompt=600, chunks=(256,), arrives=1),
]


def make_node(made: PluginForm, **size: int) -> Node:
    capability = torch.cuda.get_device_capability()
    torch.zeros(1, device="cuda")  # makes the context
    plugin = plugin_module.PagedAttention.of(made, compile_kernels(made, 10 * capability[0] + capability[1]))
    return Node(plugin_module.trt, made, plugin.attach_to_context(None), torch.Tensor.data_ptr, device="cuda", **size)


def run_all(node: Node, made: PluginForm, given: Iterator[Any]) -> set[str]:
    """Run steps twice: as they are, and as a CUDA graph that is launched again after its output was spoiled."""
    stream = torch.cuda.Stream()
    kinds = set()
    for step in given:
        space = torch.full((node.workspace_bytes(1024, 4),), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        out = node.enqueue(step, space, stream.cuda_stream)
        stream.synchronize()
        check(made, step, out.cpu())
        held: list[torch.Tensor] = []
        graph = torch.cuda.CUDAGraph()
        prepared = node.prepare(step)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            held.append(node.run(prepared, space, stream.cuda_stream))
        for _ in range(2):
            held[0].fill_(float("nan"))
            space.fill_(0xFF)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            check(made, step, held[0].cpu())
        kinds.add(step.kind)
    return kinds


@pytest.mark.parametrize("name", FORMS)
def test_small(name: str) -> None:
    made = form(**FORMS[name])
    assert run_all(make_node(made), made, steps(made)) == {"mixed", "decode"}


@pytest.mark.parametrize("name", LARGE)
def test_layers_of_models(name: str) -> None:
    made = form(**LARGE[name], table_stride=64)
    given = steps(made, waiting=LONG, blocks=80)
    assert run_all(make_node(made, blocks=80), made, given) == {"mixed", "decode"}
