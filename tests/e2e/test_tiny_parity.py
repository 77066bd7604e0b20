"""Every family, from checkpoint to text: token for token what transformers generates, in float32 on the cpu target.

Prompts and outputs cross the edges of KV blocks (16), of the window (6) and of prefill chunks (24 tokens a step), and
arrive while others run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from llmbuild import BuildConfig, build
from support.staggered import check_tokens, logits_after, serve
from support.tiny_models import VOCAB_SIZE, save_tiny, tiny_model

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2")
PROMPT_LENGTHS = (1, 5, 6, 7, 15, 16, 17, 23, 24, 25, 40, 61)
MAX_TOKENS = 20


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def convert(model_directory: Path, engine: Path, **options: object) -> None:
    build(
        BuildConfig(
            model=model_directory,
            output=engine,
            target="cpu",
            max_batch_size=8,
            max_num_tokens=24,
            max_seq_len=128,
            **options,  # type: ignore[arg-type]
        )
    )


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[torch.nn.Module, Path]]:
    """Return what gives a family's model and its engine, which is built once."""

    @cache
    def built(family: str) -> tuple[torch.nn.Module, Path]:
        model, folder = tiny_model(family), tmp_path_factory.mktemp(family)
        convert(save_tiny(model, folder / "model"), folder / "engine")
        return model, folder / "engine"

    return built


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, engine_of):
    model, engine = engine_of(family)
    check_tokens(model, engine, make_prompts(), MAX_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_request_served_alone(family: str, engine_of):
    model, engine = engine_of(family)
    prompt = make_prompts()[-1]
    served = serve(engine, [prompt], MAX_TOKENS)
    expected = logits_after(model, prompt + served.tokens[0])
    rows = {positions[-1]: logits[-1] for positions, logits in served.logits if len(logits)}
    assert sorted(rows) == list(range(len(prompt) - 1, len(prompt) + MAX_TOKENS - 1))
    for position, logits in rows.items():
        error = (torch.from_numpy(logits) - expected[position]).abs().max() / expected.abs().max()
        assert error < 1e-4, f"position {position}"


def test_preemption_changes_no_token(engine_of):
    """8 sequences of up to 75 tokens outgrow a pool of 16 blocks: some are preempted and computed again."""
    _, engine = engine_of("llama")
    prompts = [prompt[:15] for prompt in make_prompts() if len(prompt) >= 15][:8]
    roomy = serve(engine, prompts, 60)
    tight = serve(engine, prompts, 60, kv_cache_blocks=16)
    assert tight.tokens == roomy.tokens
    assert sum(tight.steps) > sum(roomy.steps)
