"""Whole pipeline on tiny models: what fires, and that nothing changes what the model computes, pass by pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.quantization.recipes import find_recipe
from support.packed_driver import Request, drive
from support.small_programs import count
from support.traced import optimized, traced

# Per family: rope, rms_norm (as matched, before add_rms_norm takes some), add_rms_norm, gated_activation,
# merge_linears.
EXPECTED = {
    "llama": (4, 5, 4, 2, 4),
    "mistral": (4, 5, 4, 2, 4),
    "qwen2": (4, 5, 4, 2, 4),
    "qwen3": (4, 9, 4, 2, 4),  # a norm on q and on k in each layer
    "phi3": (4, 5, 4, 2, 0),  # stored merged
    "gemma": (4, 5, 4, 2, 4),
    "gemma2": (4, 9, 4, 2, 4),  # norms before and after attention and MLP
    "gemma3_text": (4, 13, 4, 2, 4),
    "gpt2": (0, 0, 0, 0, 0),
    "gpt_neox": (4, 0, 0, 0, 0),  # partial rope, LayerNorm
    "gptj": (4, 0, 0, 0, 2),  # interleaved partial rope; q, k, v and fc_in read one value
    "cohere": (4, 3, 0, 2, 2),  # interleaved rope, LayerNorm by hand, parallel blocks
    "glm4": (4, 9, 4, 2, 2),  # interleaved partial rope, cos and sin of twice the width
    "olmo2": (4, 9, 1, 2, 4),  # norms after the blocks
    "smollm3": (2, 5, 4, 2, 4),  # a layer without rope
}
QUICK = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gpt2", "gptj", "cohere")


def requests(vocab_size: int) -> list[Request]:
    """A chunked prompt that crosses a block edge (8) and a window (6), and a one-token prompt that joins later."""
    rng = np.random.default_rng(1)
    draw = lambda length: rng.integers(3, min(vocab_size, 250), length).tolist()  # noqa: E731
    return [Request(draw(13), prompt=11, chunks=(7,)), Request(draw(4), prompt=1, arrives=1)]


def logits(program: Program, *, all_rows: bool = True) -> np.ndarray:
    oracle, state = Oracle(program), PagedState(num_blocks=64, block_size=8)
    runs = drive(lambda step: oracle.run(step, state).numpy(), requests(program.info.vocab_size), all_rows=all_rows)
    return np.concatenate(runs)


@pytest.fixture(scope="module")
def llama() -> Program:
    """The optimised program; tests only look at it."""
    return optimized("llama")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXPECTED]
)
def test_passes_fire_as_often_as_the_model_has_them_and_change_nothing(family: str) -> None:
    program = traced(family)
    before = logits(program)
    scale = np.abs(before).max()
    last = [before]

    def compare(name: str, program: Program) -> None:
        if program.rewrites[-1].count:
            now = logits(program)
            assert np.abs(now - last[0]).max() <= 1e-5 * scale, f"{name} changed the result"
            last[0] = now

    optimize(program, find_recipe("none"), after_pass=compare)
    counts = {rewrite.name: rewrite.count for rewrite in program.rewrites}
    names = ("rope", "rms_norm", "add_rms_norm", "gated_activation", "merge_linears")
    assert tuple(counts[name] for name in names) == EXPECTED[family]
    assert np.abs(last[0] - before).max() <= 2e-5 * scale
    some = logits(program, all_rows=False)
    asked = ~np.isnan(some)
    assert 0 < asked.sum() < some.size
    np.testing.assert_allclose(some[asked], before[asked], atol=1e-5 * scale)


def test_a_llama_layer_ends_as_its_dozen_ops(llama: Program) -> None:
    calls = [node for node in llama.graph.nodes if node.op == "call_function"]
    names = [str(node.target).split(".")[-2] if "." in str(node.target) else "getitem" for node in calls]
    end = names.index("paged_attention")
    begin = len(names[:end]) - 1 - names[:end][::-1].index("linear")
    tail = names.index("add_rms_norm", end)
    next_norm = names.index("add_rms_norm", tail + 1)
    assert names[begin:end] == ["linear", "split_with_sizes", *["getitem"] * 3, *["reshape"] * 3, "rope", "rope"]
    assert names[end:tail] == ["paged_attention", "reshape", "linear"]
    assert names[tail:next_norm] == [
        "add_rms_norm",
        *["getitem"] * 2,
        "linear",
        "split_with_sizes",
        *["getitem"] * 2,
        "gated_activation",
        "linear",
    ]


def test_cos_and_sin_are_computed_once_at_half_width(llama: Program) -> None:
    assert (count(llama, "cos"), count(llama, "sin"), count(llama, "cat")) == (1, 1, 0)
    cos = next(node for node in llama.graph.nodes if "cos" in str(node.target))
    assert cos.meta["val"].shape[-1] == 8  # head_dim 16


def test_after_the_last_attention_only_the_asked_rows_are_computed(llama: Program) -> None:
    nodes = list(llama.graph.nodes)
    last = max(place for place, node in enumerate(nodes) if "paged_attention" in str(node.target))
    rows = str(llama.placeholder("logits_indices").meta["val"].shape[0])
    linears = [node for node in nodes[last:] if node.target is torch.ops.aten.linear.default]
    assert len(linears) == 4  # o, gate_up, down, lm_head
    assert {str(node.meta["val"].shape[0]) for node in linears} == {rows}


def test_bfloat16_graphs_fuse_alike_and_keep_the_rounding_of_each_family() -> None:
    for family, rounded in (("llama", True), ("gemma", False)):
        program = optimized(family, dtype=torch.bfloat16)
        counts = {rewrite.name: rewrite.count for rewrite in program.rewrites}
        names = ("rope", "rms_norm", "add_rms_norm", "gated_activation", "merge_linears")
        assert tuple(counts[name] for name in names) == EXPECTED[family]
        norms = [node for node in program.graph.nodes if "rms_norm" in str(node.target)]
        assert {node.args[-1] for node in norms} == {rounded}


def test_gemma_weights_carry_the_offset_in_float32() -> None:
    program = traced("gemma", dtype=torch.bfloat16)
    plain = program.weights["model_norm_weight"].load()
    optimize(program, find_recipe("none"))
    norm = [node for node in program.graph.nodes if "rms_norm" in str(node.target)][-1]
    weight = program.weight_of(norm.args[2])
    assert weight is not None and weight.dtype == torch.float32
    torch.testing.assert_close(weight.load(), plain.float() + 1)
    assert weight.sources() == frozenset({"model.norm.weight"})


def test_stack_traces_survive_fusion(llama: Program) -> None:
    for node in llama.graph.nodes:
        if node.op == "call_function" and "llmbuild" in str(node.target):
            assert "modeling_llama.py" in node.meta["stack_trace"] or "attention_hook" in node.meta["stack_trace"]
