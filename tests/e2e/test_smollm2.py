"""The real model: SmolLM2-135M-Instruct from its GGUF (Q4_1), against transformers on the very same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmbuild import LLM, BuildConfig, SamplingParams, build
from llmbuild.builder.frontend import load
from llmbuild.builder.ir import Program
from support.staggered import generate, logits_after, serve
from support.traced import copied

pytestmark = pytest.mark.timeout(1200)  # transformers takes 60 ms a token here

MAX_TOKENS = 64
QUICK = 8  # prompts, of those below, that are served by default
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue to a child.",
    "def fibonacci(n):",
    "List three uses of a paperclip.",
    "Translate 'good morning' into Spanish.",
    "The quick brown fox",
    "Once upon a time, in a small village,",
    "2 + 2 =",
    "Summarise the plot of Romeo and Juliet.",
    "Who wrote the origin of species?",
    "In 1969, humans first",
    "A recipe for pancakes: take",
    "import numpy as np\n",
    "Name a prime number larger than 100.",
    "What does DNA stand for?",
    "The opposite of hot is",
    "How do I boil an egg?",
    "Dear Sir or Madam,",
    "Water boils at",
)


@pytest.fixture(scope="module")
def engines(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both of one trace: 30 layers take longer to trace than all else that a build does."""
    folder = tmp_path_factory.mktemp("smollm2")
    limits: dict[str, Any] = dict(max_batch_size=8, max_num_tokens=64, max_seq_len=512)
    program = load.load_program(smollm2_gguf, dtype=torch.float32, max_seq_len=512)

    def traced_before(path: Path, *, dtype: torch.dtype, max_seq_len: int, **_: Any) -> Program:
        assert (path, dtype, max_seq_len) == (smollm2_gguf, torch.float32, 512)
        return copied(program)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_program", traced_before)
        for recipe in ("gguf", "none"):
            config = BuildConfig(model=smollm2_gguf, output=folder / recipe, target="cpu", quant=recipe, **limits)
            build(config)
    return {"gguf": folder / "gguf", "none": folder / "none"}


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(engines: dict[str, Path]) -> list[list[int]]:
    with LLM(engines["none"], num_threads=2) as llm:
        return [llm.tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def float32_tokens(engines: dict[str, Path], prompts: list[list[int]]) -> list[list[int]]:
    return serve(engines["none"], prompts[:QUICK], MAX_TOKENS).tokens


def test_float32_engine_picks_what_transformers_picks(
    prompts: list[list[int]], float32_tokens: list[list[int]], reference: torch.nn.Module
):
    """One forward pass over each whole text: its likeliest token after every beginning is the engine's next token."""
    for prompt, tokens in zip(prompts[:QUICK], float32_tokens, strict=True):
        expected = logits_after(reference, prompt + tokens).argmax(-1)
        assert tokens == expected[len(prompt) - 1 : -1].tolist()


@pytest.mark.slow  # five minutes of transformers, a token at a time
def test_float32_engine_equals_transformers_generate(
    engines: dict[str, Path], prompts: list[list[int]], reference: torch.nn.Module
):
    """20 prompts submitted at staggered steps, 64 greedy tokens each."""
    served = serve(engines["none"], prompts, MAX_TOKENS).tokens
    for text, prompt, tokens in zip(PROMPTS, prompts, served, strict=True):
        assert tokens == generate(reference, prompt, MAX_TOKENS), text


def test_float32_logits(engines: dict[str, Path], prompts: list[list[int]], reference: torch.nn.Module):
    prompt = prompts[7]
    served = serve(engines["none"], [prompt], 32)
    expected = logits_after(reference, prompt + served.tokens[0])
    rows = {positions[-1]: torch.from_numpy(logits[-1]) for positions, logits in served.logits if len(logits)}
    worst = max(float((logits - expected[position]).abs().max()) for position, logits in rows.items())
    print(f"max |Δlogit| {worst:.2e} of logits up to {float(expected.abs().max()):.1f}")
    assert worst < 2e-3


def test_default_engine_gives_the_float32_tokens(
    engines: dict[str, Path], prompts: list[list[int]], float32_tokens: list[list[int]]
):
    """The same weights, kept in their blocks and unpacked on the way: only the order of float32 sums differs."""
    assert serve(engines["gguf"], prompts[:QUICK], MAX_TOKENS).tokens == float32_tokens


def test_chat_names_paris(engines: dict[str, Path]):
    with LLM(engines["gguf"], num_threads=2) as llm:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        [answer] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
