"""Engines of the cuda target on a GPU, against transformers; tests/sweep/test_cuda_sweep.py needs none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmbuild import LLM, BuildConfig, SamplingParams, build
from support.gpu_engines import gpu_sm
from support.staggered import generate, logits_after
from support.sweep import run, sweep_prompts
from support.tiny_models import save_tiny, tiny_model

pytestmark = pytest.mark.gpu

# One family for each way in which attention, positions, norms, experts and layouts differ.
FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "gpt2",
    "opt",
    "gptj",
    "falcon (ALiBi)",
    "bloom",
    "cohere",
    "minicpm3",
    "phi3",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
)


@pytest.fixture(scope="session")
def sm() -> str:
    return gpu_sm()


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_tokens_are_those_of_transformers(name: str, sm: str, tmp_path: Path) -> None:
    """Prompts that arrive at different steps, chunked, in blocks and windows: every greedy token, and the logits."""
    outcome = run(name, tmp_path, target="cuda", dtype="float32", sm=sm)
    assert outcome.refused is None
    assert outcome.exact
    assert outcome.error < 1e-4


@pytest.mark.parametrize("name", ("llama", "gemma2", "qwen3", "minicpm3"))
def test_bfloat16_picks_the_tokens_of_transformers(name: str, sm: str, tmp_path: Path) -> None:
    """Teacher-forced: at how many of the positions the likeliest token is that of transformers in bfloat16."""
    model, sequences, found = bfloat16_choices(name, sm, tmp_path)
    half = model.to(torch.bfloat16)
    agreed = total = 0
    for tokens, chosen in zip(sequences, found, strict=True):
        expected = logits_after(half, tokens)[:-1]
        clear = is_clear(expected)
        agreed += int(((chosen == expected.argmax(-1)) & clear).sum())
        total += int(clear.sum())
    assert total > 50
    assert agreed >= 0.99 * total


def test_bfloat16_experts_are_as_near_to_float32_as_those_of_transformers(sm: str, tmp_path: Path) -> None:
    """A router's near-ties fall either way in bfloat16, and another expert is another token: so both implementations
    in bfloat16 are compared with the model in float32, where it is clear."""
    model, sequences, found = bfloat16_choices("mixtral", sm, tmp_path)
    exact = [logits_after(model, tokens)[:-1] for tokens in sequences]
    half = model.to(torch.bfloat16)
    ours = theirs = total = 0
    for tokens, chosen, expected in zip(sequences, found, exact, strict=True):
        clear = is_clear(expected)
        ours += int(((chosen == expected.argmax(-1)) & clear).sum())
        theirs += int(((logits_after(half, tokens)[:-1].argmax(-1) == expected.argmax(-1)) & clear).sum())
        total += int(clear.sum())
    assert total > 50
    assert ours >= theirs - 0.03 * total


def bfloat16_choices(
    name: str, sm: str, directory: Path
) -> tuple[torch.nn.Module, list[list[int]], list[torch.Tensor]]:
    """Build a tiny model in bfloat16; return it in float32, some sequences, and the engine's likeliest token after
    every beginning of each."""
    model = tiny_model(name)
    save_tiny(model, directory / "model")
    config = BuildConfig(
        model=directory / "model", output=directory / "engine", target="cuda", sm=sm, max_batch_size=4, max_seq_len=128
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    sequences = [prompt + generate(model, prompt, 24) for prompt in sweep_prompts()]
    with LLM(build(config).output, kv_cache_blocks=64) as llm:
        found = [
            torch.tensor(
                [llm.generate(tokens[:end], params)[0].outputs[0].token_ids[0] for end in range(1, len(tokens))]
            )
            for tokens in sequences
        ]
    return model, sequences, found


def is_clear(logits: torch.Tensor) -> torch.Tensor:
    """Where the likeliest token leads by more than what rounding to bfloat16 may move."""
    first, second = logits.topk(2).values.unbind(-1)
    return first - second > 0.02 * logits.abs().max()


def test_device_and_host_sample_alike(sm: str, tmp_path: Path) -> None:
    """Seeded sampling, penalties and logprobs on the device, in batches of any size."""
    model = tiny_model("llama")
    save_tiny(model, tmp_path / "model")
    engines = {
        target: build(
            BuildConfig(
                model=tmp_path / "model",
                output=tmp_path / target,
                target=target,
                dtype="float32",
                sm=sm if target == "cuda" else None,
                max_batch_size=8,
                max_seq_len=128,
            )
        ).output
        for target in ("cpu", "cuda")
    }
    params = [
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=seed, max_tokens=24, ignore_eos=True, logprobs=3)
        for seed in range(6)
    ]
    params += [
        SamplingParams(temperature=1.0, min_p=0.05, seed=9, repetition_penalty=1.3, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=24, ignore_eos=True),
    ]
    prompts = (sweep_prompts() * 2)[: len(params)]
    results = {}
    for target, engine in engines.items():
        with LLM(engine, kv_cache_blocks=64) as llm:
            results[target] = llm.generate(prompts, params)
    for host, device in zip(results["cpu"], results["cuda"], strict=True):
        assert device.outputs[0].token_ids == host.outputs[0].token_ids
        if host.outputs[0].logprobs is not None:
            for one, other in zip(host.outputs[0].logprobs, device.outputs[0].logprobs, strict=True):
                assert one.keys() == other.keys()
                for token, found in one.items():
                    assert other[token].rank == found.rank
                    assert other[token].logprob == pytest.approx(found.logprob, abs=2e-4)
