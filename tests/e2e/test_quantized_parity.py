"""Quantized checkpoints from directory to text: token for token what transformers generates from the same values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llmbuild import BuildConfig, build
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.pipeline import optimize
from llmbuild.quantization.recipes import find_recipe
from support.cpu_engines import compiled, open_session, oracle_logits, session_logits
from support.staggered import check_tokens
from support.tiny_models import VOCAB_SIZE, tiny_model
from support.tiny_quantized import STORED, save_quantized

QUICK = {"gptq-zeros", "awq", "int-quantized", "fp8-blocks"}
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STORED]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_those_of_the_dequantized_model(name: str, tmp_path: Path):
    path, reference = save_quantized(tiny_model("llama"), tmp_path, STORED[name], tokenizer=True)
    engine = tmp_path / "engine"
    report = build(
        BuildConfig(path, engine, target="cpu", max_batch_size=8, max_num_tokens=24, max_seq_len=128),
    )
    assert report.manifest.precision.recipe == "stored"
    kinds = set(report.manifest.precision.weights)
    assert (STORED[name].label in kinds) == (STORED[name].blocks is not None)
    passes = json.loads((engine / "report.json").read_text())["passes"]
    assert f"14 weights stored as {STORED[name].label}" in passes[0]["declined"]
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 7, 16, 25, 40)]
    check_tokens(reference, engine, prompts, 12)


@pytest.mark.parametrize("name", ["gptq-zeros", "pack-int4-zeros", "int-quantized", "int-quantized-zeros"])
def test_onnxruntimes_own_operators_hold_the_same_values(name: str, tmp_path: Path):
    """They round activations to 8 bits in products over blocks of 32 to 256 columns, which shows."""
    path, _ = save_quantized(tiny_model("llama"), tmp_path, STORED[name])
    program = load_program(path, dtype=torch.float32)
    optimize(program, find_recipe("stored"))
    expected = oracle_logits(program)
    target = compiled(program, tmp_path / "engine", native=False)
    got = session_logits(open_session(tmp_path / "engine", target), target)
    size = max(abs(logits).max() for logits in expected)
    worst = max(abs(a - b).max() for a, b in zip(got, expected, strict=True)) / size
    assert worst < 0.15
