"""Products of 8-bit integers on the cpu target: exact, whatever the rows and weights hold, and in whole models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmbuild.builder.ir import Program
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.base import CompileOptions, Limits
from llmbuild.builder.targets.cpu.target import CpuTarget, unsupported
from llmbuild.quantization.recipes import find_recipe
from support.calibrated import gathered
from support.cpu_engines import compiled, needs_compiler, open_session, oracle_logits, session_logits
from support.rounding import check_rounded_alike, row_errors
from support.small_programs import random, result, small_program, small_step
from support.traced import traced

OPS = torch.ops.llmbuild
FORMS = [pytest.param(False, id="onnxruntime"), pytest.param(True, id="native", marks=needs_compiler)]
WINDOWS = [list(range(5, 60)), list(range(90, 130))]


def program_of(family: str, recipe: str) -> Program:
    program = traced(family)
    optimize(program, find_recipe(recipe), calibrate=gathered(WINDOWS))
    return program


@pytest.mark.parametrize("native", FORMS)
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "int8"),
        ("qwen3", "int8-sq"),
        ("gemma2", "int8-sq-static"),
        ("gpt2", "int8-sq"),
        ("mixtral", "int8-sq"),
    ],
)
def test_an_engine_computes_what_the_oracle_does(family: str, recipe: str, native: bool, tmp_path: Path) -> None:
    """Integers are summed exactly, so that only a value on the edge between two levels may fall otherwise. Without
    native operators, MatMulNBits rounds what lm_head reads as well."""
    program = program_of(family, recipe)
    expected = np.concatenate(oracle_logits(program))
    target = compiled(program, tmp_path / "engine", native=native)
    assert "int8" in target.weight_bytes
    found = np.concatenate(session_logits(open_session(tmp_path / "engine", target), target))
    check_rounded_alike(row_errors(found, expected), typical=1e-5 if native else 0.03)


def product(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    q, x_scale = OPS.quantize_rows(x, scale, torch.int8)
    return OPS.linear_scaled(q, w, x_scale, s, None, [1, w.shape[1]], torch.float32)


def onnx_result(program: Program, directory: Path) -> np.ndarray:
    """Lower a program without attention and run `small_step` on it."""
    import onnxruntime
    from safetensors.numpy import load_file

    CpuTarget(native=False).compile(program, CompileOptions(Limits(4, 16, 64), "float32"), directory)
    weights = load_file(directory / "weights/cpu.safetensors")
    options = onnxruntime.SessionOptions()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
    options.add_external_initializers(list(weights), values)
    session = onnxruntime.InferenceSession(
        (directory / "plan/model.onnx").read_bytes(), options, providers=["CPUExecutionProvider"]
    )
    step = small_step()._asdict()
    found: np.ndarray = session.run(["logits"], {each.name: step[each.name] for each in session.get_inputs()})[0]
    return found


EXTREME = torch.where(torch.arange(64).reshape(4, 16) % 5 == 0, -127, 127).to(torch.int8)
FACTORS = {
    "plain": torch.ones(16),
    "outliers": torch.tensor([1.0, 1e4, 0.0, -1.0] * 4),
    "zeros": torch.zeros(16),
    "tiny": torch.full((16,), 1e-42),
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("factor", FACTORS)
def test_products_are_exact(factor: str, static: bool, tmp_path: Path) -> None:
    """Bit for bit: sums of products of 127 and 127 too, which kernels with 16-bit sums would cut."""

    def body(x, p, w, s, f, a=None):
        return product(x * f, w, s, a)

    weights = {"w": EXTREME, "s": torch.rand(4, 1, generator=torch.Generator().manual_seed(2)), "f": FACTORS[factor]}
    if static:
        weights["a"] = torch.tensor([1e-3])  # nearly all are clipped
    program = small_program(body, **weights)
    found = onnx_result(program, tmp_path)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, result(program).numpy())


def test_nan_gives_no_finite_number(tmp_path: Path) -> None:
    broken = torch.where(torch.arange(16) == 3, float("nan"), 1.0)
    program = small_program(lambda x, p, w, s, f: product(x * f, w, s), w=EXTREME, s=torch.ones(4, 1), f=broken)
    assert not np.isfinite(onnx_result(program, tmp_path)).any()


def test_what_it_has_no_products_of_is_refused_by_name() -> None:
    def float8(x, p, w, s):
        q, scale = OPS.quantize_rows(x, None, torch.float8_e4m3fn)
        return OPS.linear_scaled(q, w.to(torch.float8_e4m3fn), scale, s, None, [1, 16], torch.float32)

    program = small_program(float8, w=random(4, 16), s=torch.ones(4, 1))
    reasons = {reason for _, reason in unsupported(program.graph, native=False, paged=False)}
    assert "dtype torch.float8_e4m3fn has no kernels in onnxruntime on the CPU" in reasons

    def groups(x, p, w, s):
        q, scale = OPS.quantize_rows(x.reshape(-1, 2, 8), None, torch.int8)
        return OPS.linear_scaled(q.reshape(-1, 16), w, scale.reshape(-1, 2), s, None, [1, 8], torch.float32)

    program = small_program(groups, w=EXTREME, s=torch.ones(4, 2))
    reasons = {reason for _, reason in unsupported(program.graph, native=False, paged=False)}
    assert any("not those of one quantize_rows" in reason for reason in reasons)
