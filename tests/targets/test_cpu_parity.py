"""The lowered ONNX against the oracle of the same program, with native operators and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmbuild.builder.targets.cpu import native_library
from support.cpu_engines import compiled, needs_compiler, open_session, oracle_logits, session_logits
from support.tiny_models import FAMILIES
from support.traced import optimized

FORMS = [pytest.param(False, id="onnxruntime"), pytest.param(True, id="native", marks=needs_compiler)]

# One family for each form of attention, rope, norm and activation that the lowering has; the others are marked slow.
QUICK = {"llama", "mistral", "qwen3", "gemma2", "phi3", "gpt2", "cohere", "minicpm3", "apertus"}
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("family", CASES)
def test_float32(family: str, tmp_path: Path) -> None:
    """Float32 engines differ from the oracle by rounding only, whichever attention they have."""
    program = optimized(family)
    expected = oracle_logits(program)
    for native in (False, True):
        if native and native_library.find_compiler() is None:
            continue
        directory = tmp_path / str(native)
        target = compiled(program, directory, native=native)
        got = session_logits(open_session(directory, target), target)
        assert largest_difference(got, expected) < 1e-5, f"native={native}"


@pytest.mark.parametrize("recipe", ["int8-wo", "int4-wo"])
@pytest.mark.parametrize("native", FORMS)
def test_weight_only(recipe: str, native: bool, tmp_path: Path) -> None:
    """The oracle multiplies with the same dequantized weights. The native operators keep activations in float32;
    onnxruntime's round them to 8 bits, which shows."""
    program = optimized("llama", recipe)
    expected = oracle_logits(program)
    target = compiled(program, tmp_path / "engine", native=native)
    got = session_logits(open_session(tmp_path / "engine", target), target)
    assert largest_difference(got, expected) < (1e-5 if native else 0.1)


@pytest.mark.parametrize("recipe", ["int8-wo-channel", "int4-wo-g128", "int4-wo-g128-asym", "int4-wo-g64-asym"])
@pytest.mark.parametrize("native", FORMS)
def test_larger_groups(recipe: str, native: bool, tmp_path: Path) -> None:
    """down_proj has 160 columns: whole groups and a part of one, or one scale a row."""
    program = optimized("llama", recipe, intermediate_size=160)
    expected = oracle_logits(program)
    target = compiled(program, tmp_path / "engine", native=native)
    got = session_logits(open_session(tmp_path / "engine", target), target)
    assert largest_difference(got, expected) < (1e-5 if native else 0.15)


@needs_compiler
def test_packed_graph_is_still_right_for_the_oracle(tmp_path: Path) -> None:
    """The target's own pass keeps the graph executable: the oracle gives the same logits before and after."""
    program = optimized("llama")
    before = oracle_logits(program)
    compiled(program, tmp_path / "engine", native=True)
    assert program.rewrites[-1].name == "cpu_packed"
    assert program.rewrites[-1].count == 2 * 2  # attention and gated activation in each of two layers
    assert largest_difference(oracle_logits(program), before) == 0


def largest_difference(got: list, expected: list) -> float:
    """Largest absolute difference over all steps, relative to the largest logit."""
    scale = max(float(abs(logits).max()) for logits in expected)
    return max(float(abs(a - b).max()) for a, b in zip(got, expected, strict=True)) / scale
