"""Serve prompts that arrive at different steps, and compare what comes out with Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from llmbuild.engine.reader import open_engine
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executor import Executor, StepInput
from llmbuild.runtime.loading import load_engine
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampler import SampledTokens, sample
from llmbuild.runtime.sampling_batch import SamplingBatch
from llmbuild.runtime.sampling_params import SamplingParams


class Recorder:
    """An executor that keeps the logits it samples from, by (last position, row order)."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_blocks, self.block_size = executor.num_blocks, executor.block_size
        self.logits: list[tuple[list[int], np.ndarray]] = []
        self.step_tokens: list[int] = []

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        logits = self.forward(step)
        self.logits.append((step.position_ids[step.logits_indices].tolist(), logits.copy()))
        self.step_tokens.append(len(step.input_ids))
        return sample(logits, sampling)

    def forward(self, step: StepInput) -> np.ndarray:
        return self.executor.forward(step)

    def close(self) -> None:
        self.executor.close()


class Served(NamedTuple):
    """tokens: greedy output of each prompt. steps: tokens of each step that ran."""

    tokens: list[list[int]]
    logits: list[tuple[list[int], np.ndarray]]
    steps: list[int]


def serve(
    engine: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    every: int = 2,
    kv_cache_blocks: int | None = None,
) -> Served:
    """Greedy completions of `prompts`, one more arriving every `every` steps. Invariants checked after each step."""
    on_cpu = open_engine(engine).manifest.target.name == "cpu"
    loaded = load_engine(engine, num_threads=2 if on_cpu else None, kv_cache_blocks=kv_cache_blocks)
    recorder = Recorder(loaded.executor)
    core = EngineCore(recorder, loaded.limits, None)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    pool_tokens = recorder.num_blocks * recorder.block_size
    waiting = [
        make_request(str(index), prompt, params, loaded.limits, pool_tokens=pool_tokens)
        for index, prompt in enumerate(prompts)
    ]
    tokens: dict[int, list[int]] = {}
    step = 0
    while waiting or core.has_work:
        if waiting and step % every == 0:
            core.add(waiting.pop(0))
        for output in core.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        core.check_invariants()
        step += 1
    assert core.num_free_blocks == recorder.num_blocks
    core.close()
    return Served([tokens[index] for index in range(len(prompts))], recorder.logits, recorder.step_tokens)


def check_tokens(model: torch.nn.Module, engine: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Serve an engine of 24 tokens a step and compare all of its tokens with those of transformers."""
    served = serve(engine, prompts, max_tokens)
    assert max(served.steps) == 24  # chunked: at least one step was filled to the budget
    for prompt, tokens in zip(prompts, served.tokens, strict=True):
        assert tokens == generate(model, prompt, max_tokens)


def generate(model: torch.nn.Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers' own greedy `generate` gives, end of sequence ignored."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, ids.shape[1] :].tolist()


def logits_after(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """float32 logits [len(tokens), V] of one forward pass over the whole sequence, without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
