"""What the runtime costs a decode step, and what host sampling costs a row: the model itself does nothing here.

    python bench/step_overhead.py [--rounds 20] [--save]

JSON lines first, tables last. Times are the best of the rounds, in microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from records import emit, environment, table, write_results

from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampler import SampledTokens, sample
from llmbuild.runtime.sampling_batch import SamplingBatch
from llmbuild.runtime.sampling_params import SamplingParams

SAMPLERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}


class NoModel:
    """An executor that samples token 5 without running anything."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._tokens = np.full(4096, 5, np.int32)

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        return SampledTokens(self._tokens[: len(step.logits_indices)], None)

    def forward(self, step: StepInput) -> np.ndarray:
        raise NotImplementedError("there is no model")

    def close(self) -> None:
        pass


def best_us(run: Callable[[], Any], rounds: int, repeat: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        best = min(best, (time.perf_counter() - start) / repeat)
    return round(best * 1e6, 1)


def step_overhead(batch: int, rounds: int) -> dict[str, Any]:
    """Schedule, build, collect, for `batch` greedy sequences in mid-decode."""
    limits = ServingLimits(batch, 8192, 4096, 50_000)
    executor = NoModel(batch * 256, 16)
    core = EngineCore(executor, limits)
    params = SamplingParams(temperature=0, ignore_eos=True)
    for index in range(batch):
        core.add(make_request(str(index), [1] * 32, params, limits, pool_tokens=executor.num_blocks * 16))
    core.step()
    return emit(kind="step", batch=batch, us=best_us(core.step, rounds, 50))


def sampling_cost(name: str, vocab: int, rounds: int) -> dict[str, Any]:
    logits = (np.random.default_rng(0).normal(size=(1, vocab)) * 3).astype(np.float32)
    batch = SamplingBatch.greedy(1)
    for field, value in SAMPLERS[name].items():
        batch = batch._replace(**{field: np.full(1, value, getattr(batch, field).dtype)})
    batch = batch._replace(all_greedy=not SAMPLERS[name])
    return emit(kind="sample", sampler=name, vocab=vocab, us=best_us(lambda: sample(logits, batch), rounds, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20, help="the best of so many")
    parser.add_argument("--save", action="store_true", help="write bench/results/<date>-step-overhead.jsonl")
    options = parser.parse_args()
    about = emit(**environment(["numpy", "llmbuild"]))
    steps = [step_overhead(batch, options.rounds) for batch in (1, 16, 64, 256)]
    samples = [sampling_cost(name, vocab, options.rounds) for vocab in (49_152, 151_936) for name in SAMPLERS]
    if options.save:
        write_results("step-overhead", [about, *steps, *samples])
    table("Runtime's share of a decode step", steps, ["batch", "us"])
    table("Sampling one row on the host", samples, ["vocab", "sampler", "us"])


if __name__ == "__main__":
    main()
