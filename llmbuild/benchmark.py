"""Latency and throughput of a loaded engine, from the times its own requests report.

    arrival              first token                          last token
       |--- TTFT ------------|--- (output_len - 1) decode steps ---|
       |--- latency -----------------------------------------------|

Prompts are seeded random ids, so that nothing depends on a text; the end of sequence is ignored, so that every request
has the length asked for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llmbuild.errors import ConfigError

if TYPE_CHECKING:
    from llmbuild.runtime.async_llm import AsyncLLM
    from llmbuild.runtime.limits import ServingLimits
    from llmbuild.runtime.llm import LLM
    from llmbuild.runtime.outputs import RequestOutput
    from llmbuild.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of a list of measurements."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float], digits: int = 3) -> Spread:
        numbers = (sum(values) / len(values), *(percentile(values, p) for p in (50, 90, 99)))
        return Spread(*(round(number, digits) for number in numbers))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the values lie, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def measure_latency(
    llm: LLM, *, batch_size: int, input_len: int, output_len: int, warmup: int, iterations: int, seed: int = 0
) -> dict[str, Any]:
    """Run batches of equal requests one after another.

    Args:
        batch_size: Requests that start together; at most the engine's limit.
        input_len, output_len: Tokens of each prompt and completion.
        warmup, iterations: Batches that are not measured, and that are.

    Returns:
        A JSON record. All times in milliseconds; ms_per_token is between tokens of one request, TTFT aside.

    Raises:
        ConfigError: The batch is larger than the engine's.
        RequestError: The lengths are beyond the engine's limits.
    """
    if batch_size > llm.limits.max_batch_size:
        raise ConfigError(
            f"batch size {batch_size} is beyond the engine's {llm.limits.max_batch_size}",
            where="--batch-size",
            hint="convert with a larger --max-batch-size, or measure `bench throughput`",
        )
    params = _params(output_len)
    chosen = random.Random(seed)
    latency, first, between = [], [], []
    for number in range(warmup + iterations):
        prompts = random_prompts(chosen, batch_size, input_len, llm.limits)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        if number >= warmup:
            latency.append(seconds * 1e3)
            first += [_first_token(output) * 1e3 for output in outputs]
            between += [_between_tokens(output, output_len) * 1e3 for output in outputs]
    return {
        "kind": "latency",
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "iterations": iterations,
        "latency_ms": asdict(Spread.of(latency)),
        "ttft_ms": asdict(Spread.of(first)),
        "ms_per_token": asdict(Spread.of(between)),
    }


def measure_throughput(
    llm: AsyncLLM, *, num_prompts: int, input_len: int, output_len: int, concurrency: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Serve many requests, at most `concurrency` of them at a time (None: all at once, the engine's queue decides).

    Returns:
        A JSON record: requests and tokens per second over the whole run, and TTFT and ms per token over the requests
        (queueing included, as a client sees it).

    Raises:
        RequestError: The lengths are beyond the engine's limits.
    """
    prompts = random_prompts(random.Random(seed), num_prompts, input_len, llm.limits)
    params = _params(output_len)
    slots = num_prompts if concurrency is None else concurrency

    async def serve() -> list[RequestOutput]:
        gate = asyncio.Semaphore(slots)

        async def one(prompt: list[int]) -> RequestOutput:
            async with gate:
                async for output in llm.generate(prompt, params):
                    last = output
            return last

        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    start = time.perf_counter()
    outputs = asyncio.run(serve())
    seconds = time.perf_counter() - start
    return {
        "kind": "throughput",
        "num_prompts": num_prompts,
        "concurrency": slots,
        "input_len": input_len,
        "output_len": output_len,
        "seconds": round(seconds, 3),
        "requests_per_s": round(num_prompts / seconds, 3),
        "output_tok_s": round(num_prompts * output_len / seconds, 2),
        "total_tok_s": round(num_prompts * (input_len + output_len) / seconds, 2),
        "ttft_ms": asdict(Spread.of([_first_token(output) * 1e3 for output in outputs])),
        "ms_per_token": asdict(Spread.of([_between_tokens(output, output_len) * 1e3 for output in outputs])),
    }


def random_prompts(chosen: random.Random, count: int, length: int, limits: ServingLimits) -> list[list[int]]:
    """Return `count` prompts of `length` ids drawn from the whole vocabulary."""
    return [[chosen.randrange(limits.vocab_size) for _ in range(length)] for _ in range(count)]


def _params(output_len: int) -> SamplingParams:
    from llmbuild.runtime.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def _first_token(output: RequestOutput) -> float:
    assert output.metrics.first_token_s is not None
    return output.metrics.first_token_s


def _between_tokens(output: RequestOutput, output_len: int) -> float:
    """Return seconds per decode step; 0 when there is none to measure."""
    assert output.metrics.finished_s is not None
    return (output.metrics.finished_s - _first_token(output)) / max(output_len - 1, 1)
