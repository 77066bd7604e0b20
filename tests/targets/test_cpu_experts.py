"""Experts on the cpu target: both forms of the lowering and the native operators, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from llmbuild.builder.passes.quantize_weights import choose_formats, use_blocks
from llmbuild.builder.passes.stack_experts import stack_experts
from llmbuild.builder.targets.base import CompileOptions, Limits
from llmbuild.builder.targets.cpu import native_library
from llmbuild.builder.targets.cpu.target import CpuTarget
from llmbuild.builder.targets.onnx_graph.emitter import NATIVE
from llmbuild.plugins import moe_reference
from llmbuild.quantization.recipes import find_recipe
from llmbuild.runtime.executors.cpu_session import CpuSession
from support.cpu_engines import compiled, needs_compiler, open_session, oracle_logits, session_logits
from support.small_programs import random, result, small_program
from support.tiny_models import MOE_FAMILIES
from support.traced import optimized

COMPILER = native_library.find_compiler()
FORMS = [pytest.param(False, id="onnxruntime"), pytest.param(True, id="native", marks=needs_compiler)]
EXPERTS, CHOICES, HIDDEN = 5, 2, 16

CASES: dict[str, dict[str, Any]] = {
    "silu": {},
    "gpt-oss": dict(slope=1.702, limit=0.6, shift=1.0, biases=True),
    "clamped silu": dict(limit=0.5),
    "gelu_tanh": dict(activation="gelu_tanh"),
    "gelu": dict(activation="gelu"),
    "relu": dict(activation="relu"),
    "relu2 without gate": dict(activation="relu2", gated=False, biases=True),
    "sigmoid": dict(activation="sigmoid"),
}


def program_of(case: dict[str, Any], inner: int = 24):
    """A router and one mixture: all of its arguments are weights or come from the tokens."""
    kind = dict(activation="silu", gated=True, slope=1.0, limit=None, shift=0.0) | case
    biases = kind.pop("biases", False)
    rows = 2 * inner if kind["gated"] else inner
    tensors = {
        "router": random(EXPERTS, HIDDEN),
        "up": random(EXPERTS, rows, HIDDEN, seed=1) / 4,
        "down": random(EXPERTS, HIDDEN, inner, seed=2) / 4,
        **({"a": random(EXPERTS, rows, seed=3), "b": random(EXPERTS, HIDDEN, seed=4)} if biases else {}),
    }

    def body(x: Tensor, positions: Tensor, router: Tensor, up: Tensor, down: Tensor, *rest: Tensor) -> Tensor:
        scores, ids = torch.topk(torch.softmax(torch.nn.functional.linear(x, router), dim=-1), CHOICES)
        return torch.ops.llmbuild.moe_experts(x, ids, scores, up, down, *(rest or (None, None)), *kind.values())

    return small_program(body, vocab_size=0, **tensors)


def compute(program, directory: Path, native: bool) -> np.ndarray:
    """The rows that `small_programs.result` gives, from the compiled graph."""
    options = CompileOptions(Limits(max_batch_size=1, max_num_tokens=8, max_seq_len=16, block_size=4), "float32")
    section = CpuTarget(native=native).compile(program, options, directory).section
    library = section["native"] and directory / section["native"]["library"]
    session = CpuSession(directory / section["model"], directory / section["weights"], library, slots=8, threads=2)
    tokens = np.arange(6, dtype=np.int32)
    rows = np.array([5, 0, 2], np.int32)
    inputs = {"input_ids": (tokens * 5 + 3) % 32, "position_ids": tokens + 3, "logits_indices": rows}
    return session.run({name: value for name, value in inputs.items() if name in session.inputs}).copy()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("native", FORMS)
def test_float32(case: str, native: bool, tmp_path: Path) -> None:
    program = program_of(CASES[case])
    expected = result(program).numpy()
    stack_experts(program)
    np.testing.assert_allclose(compute(program, tmp_path, native), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("recipe", "inner"), [("int8-wo", 40), ("int8-wo", 64), ("int4-wo", 32), ("int4-wo", 40), ("int4-wo", 33)]
)
@pytest.mark.parametrize("native", FORMS)
def test_in_blocks(recipe: str, inner: int, native: bool, tmp_path: Path) -> None:
    """The reference multiplies with the same dequantized weights; native operators also round activations.

    33 channels are 66 rows an expert: no whole tiles of 8, so the native engine takes the portable form.
    """
    program = program_of({}, inner)
    stack_experts(program)
    choose_formats(program, find_recipe(recipe))
    assert use_blocks(program).count == 1
    expected = result(program).numpy()
    error = np.abs(compute(program, tmp_path, native) - expected).max() / np.abs(expected).max()
    assert error < (1e-3 if native and inner % 4 == 0 else 2e-6)


QUICK = ("deepseek_v3",)


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MOE_FAMILIES]
)
def test_family_in_float32(family: str, tmp_path: Path) -> None:
    program = optimized(family)
    expected = oracle_logits(program)
    scale = max(float(abs(logits).max()) for logits in expected)
    for native in (False, True) if COMPILER else (False,):
        target = compiled(program, tmp_path / str(native), native=native)
        got = session_logits(open_session(tmp_path / str(native), target), target)
        worst = max(float(abs(a - b).max()) for a, b in zip(got, expected, strict=True)) / scale
        assert worst < 2e-5, f"native={native}"


# ------------------------------------------------------------------------------------------- the operator alone
@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("native") / "native.so"
    native_library.compile_library(COMPILER, path)
    return path


def operator(library: Path, x, ids, scores, up, down) -> np.ndarray:
    inputs = {"x": x, "ids": ids, "scores": scores, "up": up, "down": down}
    attributes = dict(activation=0, gated=1, slope=1.0, limit=0.0, shift=0.0)
    kinds = {np.dtype("f4"): TensorProto.FLOAT, np.dtype("i4"): TensorProto.INT32}
    graph = helper.make_graph(
        [helper.make_node("MoeExperts", list(inputs), ["y"], domain=NATIVE, **attributes)],
        "one",
        [helper.make_tensor_value_info(name, kinds[value.dtype], value.shape) for name, value in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(NATIVE, 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(library))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, inputs)[0]


def mixture(tokens: int, experts: int, choices: int, hidden: int, inner: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(seed)
    ids = np.stack([draw.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)
    shapes = [(tokens, hidden), (tokens, choices), (experts, 2 * inner, hidden), (experts, hidden, inner)]
    x, scores, up, down = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, ids, scores, up / 4, down / 4


@needs_compiler
@pytest.mark.parametrize("sizes", [(1, 3, 1, 8, 4), (7, 9, 3, 13, 11), (40, 5, 2, 96, 33), (3, 64, 8, 24, 16)], ids=str)
def test_operator(sizes: tuple[int, ...], library: Path) -> None:
    """Widths that are no multiple of 8 or 4, experts with no token, with one, and with many."""
    given = mixture(*sizes)
    x, ids, scores, up, down = (torch.from_numpy(array) for array in given)
    doubles = (tensor.double() for tensor in (x, up, down))
    x64, up64, down64 = doubles
    expected = moe_reference.experts(x64, ids, scores, up64, down64, None, None, "silu", True, 1.0, None, 0.0)
    np.testing.assert_allclose(operator(library, *given), expected.numpy(), rtol=2e-5, atol=1e-5)


@needs_compiler
def test_a_token_is_the_same_alone_and_in_a_batch(library: Path) -> None:
    x, ids, scores, up, down = mixture(23, 6, 3, 40, 20)
    together = operator(library, x, ids, scores, up, down)
    for t in (0, 5, 22):
        one = slice(t, t + 1)
        assert np.array_equal(operator(library, x[one], ids[one], scores[one], up, down)[0], together[t])


@needs_compiler
def test_an_expert_that_does_not_exist_is_refused(library: Path) -> None:
    x, ids, scores, up, down = mixture(2, 3, 2, 8, 8)
    ids[1, 0] = 3
    with pytest.raises(Exception, match="an expert id is out of range"):
        operator(library, x, ids, scores, up, down)
