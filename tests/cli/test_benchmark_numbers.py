from __future__ import annotations

import random
import statistics

import pytest

from llmbuild.benchmark import Spread, measure_latency, percentile, random_prompts
from llmbuild.errors import ConfigError
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.llm import LLM
from support.fake_executor import FakeExecutor

LIMITS = ServingLimits(max_batch_size=2, max_num_tokens=8, max_seq_len=32, vocab_size=50, eos_token_ids=(1,))


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_agree_with_the_standard_library(count):
    values = [random.Random(count).random() for _ in range(count)]
    assert percentile(values, 50) == pytest.approx(statistics.median(values))
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)
    if count > 1:
        quantiles = statistics.quantiles(values, n=100, method="inclusive")
        assert percentile(values, 90) == pytest.approx(quantiles[89])


def test_spread_rounds():
    assert Spread.of([1.0, 2.00049]) == Spread(mean=1.5, p50=1.5, p90=1.9, p99=1.99)


def test_prompts_are_seeded_and_inside_the_vocabulary():
    prompts = random_prompts(random.Random(3), 20, 9, LIMITS)
    assert prompts == random_prompts(random.Random(3), 20, 9, LIMITS)
    assert {len(prompt) for prompt in prompts} == {9}
    assert max(max(prompt) for prompt in prompts) < 50


def test_latency_runs_as_many_batches_as_asked():
    executor = FakeExecutor(LIMITS, num_blocks=16, block_size=4)
    record = measure_latency(
        LLM.over(executor, LIMITS), batch_size=2, input_len=4, output_len=5, warmup=1, iterations=3
    )
    assert executor.steps == 4 * 5  # 4 batches; each has one step of prefill, which gives a token, and 4 of decode
    assert record["iterations"] == 3
    assert record["latency_ms"]["p50"] > record["ttft_ms"]["p50"] > 0


def test_batch_beyond_the_engine_is_refused():
    llm = LLM.over(FakeExecutor(LIMITS, num_blocks=16, block_size=4), LIMITS)
    with pytest.raises(ConfigError, match="batch size 3 is beyond the engine's 2\n  where: --batch-size"):
        measure_latency(llm, batch_size=3, input_len=4, output_len=4, warmup=0, iterations=1)
