"""Mixtures of experts from checkpoint to text: in float32 on the cpu target, token for token what transformers gives.

Requests arrive while others run, so tokens of several sequences share experts in one step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmbuild import BuildConfig, build
from support.staggered import check_tokens, serve
from support.tiny_models import MOE_FAMILIES, VOCAB_SIZE, save_tiny, tiny_model

QUICK = ("qwen3_moe", "gpt_oss")
PROMPT_LENGTHS = (1, 6, 16, 25, 40)
MAX_TOKENS = 12


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(12)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def convert(model_directory: Path, engine: Path, **options: object) -> None:
    limits = dict(max_batch_size=4, max_num_tokens=24, max_seq_len=128)
    build(BuildConfig(model=model_directory, output=engine, target="cpu", **limits, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MOE_FAMILIES]
)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path):
    model = tiny_model(family)
    save_tiny(model, tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "engine")
    check_tokens(model, tmp_path / "engine", make_prompts(), MAX_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8-wo", "int4-wo"])
def test_a_quantized_engine_is_the_same_alone_and_among_others(recipe: str, tmp_path: Path):
    save_tiny(tiny_model("qwen3_moe"), tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "engine", quant=recipe)
    prompts = make_prompts()
    together = serve(tmp_path / "engine", prompts, MAX_TOKENS).tokens
    assert together == [serve(tmp_path / "engine", [prompt], MAX_TOKENS).tokens[0] for prompt in prompts]
