"""What the cpu target writes, and what it refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file

from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.base import CompileOptions
from llmbuild.builder.targets.cpu import native_library
from llmbuild.builder.targets.cpu.target import CpuTarget
from llmbuild.builder.targets.registry import find_target
from llmbuild.errors import ConfigError, UnsupportedError
from llmbuild.quantization.recipes import find_recipe
from support.cpu_engines import LIMITS, compiled, needs_compiler
from support.tiny_models import save_tiny, tiny_model
from support.traced import optimized


@needs_compiler
@pytest.mark.parametrize("recipe", ["none", "int4-wo"])
def test_same_model_gives_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    """From two folders: neither is in what is written."""
    digests = []
    for place in ("first", "second"):
        path = save_tiny(tiny_model("llama"), tmp_path / place / "model")
        program = load_program(path, dtype=torch.float32)
        optimize(program, find_recipe(recipe))
        target = compiled(program, tmp_path / place / "engine", native=True)
        files = sorted(path for path in (tmp_path / place / "engine").rglob("*") if path.is_file())
        digests.append([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
        assert json.dumps(target.section, sort_keys=True)
    assert digests[0] == digests[1]
    assert [name for name, _ in digests[0]] == ["model.onnx", "native.so", "cpu.safetensors"]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_compiler)])
def test_files(native: bool, tmp_path: Path) -> None:
    """The graph holds no weights; the weight file is plain safetensors from a page on; ties are stored once."""
    program = optimized("gemma2")  # ties its embedding
    target = compiled(program, tmp_path / "engine", native=native)
    tensors = load_file(tmp_path / "engine" / "weights" / "cpu.safetensors")
    assert sum(array.nbytes for array in tensors.values()) == sum(target.weight_bytes.values())
    assert sum(array.shape == (288, 64) for array in tensors.values()) == 1
    raw = (tmp_path / "engine" / "weights" / "cpu.safetensors").read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 4096 == 0
    model = onnx.load(tmp_path / "engine" / "plan" / "model.onnx", load_external_data=False)
    stored = {item.name for item in model.graph.initializer if item.data_location == onnx.TensorProto.EXTERNAL}
    assert stored == set(tensors)
    assert max(len(item.raw_data) for item in model.graph.initializer) < 1024
    assert (target.section["native"] is not None) == native
    assert (tmp_path / "engine" / "plan" / "native.so").exists() == native


def test_nodes_carry_the_names_of_the_graph(tmp_path: Path) -> None:
    program = optimized("llama")
    compiled(program, tmp_path / "engine", native=False)
    model = onnx.load(tmp_path / "engine" / "plan" / "model.onnx", load_external_data=False)
    names = {node.name.split(".")[0] for node in model.graph.node}
    calls = {node.name for node in program.graph.nodes if node.op == "call_function" and "linear" in node.name}
    assert len(calls) == 9
    assert calls <= names


def test_all_unsupported_nodes_are_named_at_once(tmp_path: Path) -> None:
    program = optimized("llama")
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten.cos.default:
            node.target = torch.ops.aten.acosh.default
        if node.target is torch.ops.aten.sin.default:
            node.target = torch.ops.aten.lgamma.default
    with pytest.raises(UnsupportedError) as caught:
        compiled(program, tmp_path / "engine", native=False)
    text = str(caught.value)
    assert "target 'cpu' cannot lower 2 node(s):" in text
    assert "aten.acosh.default" in text and "aten.lgamma.default" in text
    assert text.count("no rule for this op [modeling_llama.py:") == 2
    assert not (tmp_path / "engine").exists()


def test_a_rule_that_declines_says_why(tmp_path: Path) -> None:
    program = optimized("llama", "int4-wo")
    for node in program.graph.nodes:
        if node.target is torch.ops.llmbuild.linear_blockwise.default:
            node.args = (*node.args[:5], 3, *node.args[6:])
            break
    with pytest.raises(UnsupportedError, match=r"3-bit blocks \(4 and 8 are known\)"):
        compiled(program, tmp_path / "engine", native=False)


def test_only_float32(tmp_path: Path) -> None:
    program = optimized("llama")
    with pytest.raises(ConfigError, match="the cpu target computes in float32, not bfloat16") as caught:
        CpuTarget().compile(program, CompileOptions(LIMITS, "bfloat16"), tmp_path / "engine")
    assert "--quant int8-wo" in str(caught.value)


def test_registry() -> None:
    assert find_target("cpu").name == "cpu"
    with pytest.raises(ConfigError, match="unknown target 'cpi'") as caught:
        find_target("cpi")
    assert "did you mean 'cpu'" in str(caught.value)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(native_library.VARIABLE, "none")
    assert native_library.find_compiler() is None
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler was found"):
        compiled(optimized("llama"), tmp_path / "engine", native=True)


def test_a_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_library.VARIABLE, "/nowhere/c++")
    with pytest.raises(ConfigError, match="LLMBUILD_CXX='/nowhere/c\\+\\+' does not run"):
        native_library.find_compiler()


@needs_compiler
def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = native_library.find_compiler()
    assert compiler is not None
    broken = {**native_library.sources(), "simd.h": b"#error deliberately broken\n"}
    monkeypatch.setattr(native_library, "sources", lambda: broken)
    with pytest.raises(ConfigError, match="deliberately broken"):
        native_library.compile_library(compiler, tmp_path / "out.so")
    assert not (tmp_path / "out.so").exists()
    assert not list((tmp_path / "llmbuild").iterdir())


@needs_compiler
def test_heads_that_native_attention_cannot_serve(tmp_path: Path) -> None:
    """Heads of 12 channels: attention in standard operators, linears native all the same."""
    program = optimized("llama", "int4-wo", head_dim=12)
    target = compiled(program, tmp_path / "engine", native=True)
    assert target.section["attention"] == "dense"
    model = onnx.load(tmp_path / "engine" / "plan" / "model.onnx", load_external_data=False)
    kinds = {node.op_type for node in model.graph.node}
    assert "BlockLinear" in kinds and "PagedAttention" not in kinds


def test_int8_values_are_stored_unchanged(tmp_path: Path) -> None:
    """Dequantizing what the weight file holds gives the very weight that the program has."""
    program = optimized("llama", "int8-wo")
    expected = {name: expr.load().numpy() for name, expr in program.weights.items() if name.endswith(("_q", "_scale"))}
    compiled(program, tmp_path / "engine", native=False)
    tensors = load_file(tmp_path / "engine" / "weights" / "cpu.safetensors")
    for name, q in expected.items():
        if name.endswith("_q"):
            base = name.removesuffix("_q")
            stored = tensors[f"{base}.values"].reshape(q.shape[0], -1)[:, : q.shape[1]]
            assert np.array_equal(stored, q)
            assert np.array_equal(tensors[f"{base}.scales"], expected[f"{base}_scale"])
