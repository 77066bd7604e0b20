"""Sampling on the device gives the tokens and log-probabilities that the host's sampler gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbuild.engine.reader import open_engine
from llmbuild.errors import LLMBuildError
from llmbuild.runtime.executors.cuda import load as load_module
from llmbuild.runtime.executors.cuda.count_rows import CountRows
from llmbuild.runtime.executors.cuda.device_sampler import Choice
from llmbuild.runtime.executors.cuda.executor import CudaExecutor
from llmbuild.runtime.llm import LLM
from llmbuild.runtime.sampler import sample
from llmbuild.runtime.sampling_batch import RowExtras, SamplingBatch
from llmbuild.runtime.sampling_params import SamplingParams
from support.cuda_engine import BATCH, TOKENS, VOCAB, fake_gpu, step, write_cuda_engine
from support.cuda_sampling import (
    ENTRIES,
    MOST_LOGPROBS,
    sampling_kernels,
    sampling_launches,
    sampling_plan,
)
from support.fake_device import FakeDevice
from support.fake_executor import reference_logits


@pytest.fixture
def device_engine(tmp_path: Path) -> Path:
    return write_cuda_engine(tmp_path / "device", launch_plan=sampling_plan(), kernels=sampling_launches())


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeDevice]:
    made: list[FakeDevice] = []

    def make(ordinal: int) -> FakeDevice:
        device = fake_gpu()
        device.kernels |= sampling_kernels()
        made.append(device)
        return device

    monkeypatch.setattr(load_module, "Device", make)
    return made


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(3)

    def params(**values: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 14, "ignore_eos": True, "seed": 11, "temperature": 0.8, **values})

    kinds = [
        params(temperature=0),
        params(),
        params(top_k=5, top_p=0.7),
        params(min_p=0.2, n=2),
        params(temperature=0, repetition_penalty=1.5, frequency_penalty=0.3),
        params(presence_penalty=1.0, n=2),
        params(temperature=0, logit_bias={3: 4.0, 5: -2.0}),
        params(allowed_token_ids=[1, 2, 3, 40, 50]),
        params(logprobs=3),
        params(temperature=0, logprobs=0, frequency_penalty=0.5),
        params(temperature=0, ignore_eos=False, min_tokens=9),
        params(max_tokens=25, repetition_penalty=1.2),
    ]
    return [(rng.integers(0, VOCAB, 1 + 2 * index).tolist(), kind) for index, kind in enumerate(kinds)]


def served(path: Path, **options: Any) -> list[Any]:
    prompts, params = zip(*requests(), strict=True)
    with LLM(path, **options) as llm:
        outputs = llm.generate(list(prompts), list(params))
    found = []
    for output in outputs:
        for completion in output.outputs:
            found.append(list(completion.token_ids))
            for entry in completion.logprobs or []:
                found.append([(token, round(each.logprob, 4), each.rank) for token, each in entry.items()])
    return found


@pytest.mark.parametrize("blocks", [60, 14])
def test_serving_gives_what_the_host_samples(
    tmp_path: Path, device_engine: Path, gpus: list[FakeDevice], blocks: int
) -> None:
    host = served(write_cuda_engine(tmp_path / "host"), kv_cache_blocks=blocks)
    device = served(device_engine, kv_cache_blocks=blocks)
    assert device == host
    symbols = [each.symbol for each in gpus[1].launched]
    for name in ("full", "adjusted", "logprobs", "count", "enter"):
        assert f"s_{name}" in symbols
    assert gpus[1].graphs_launched and all(gpu.closed for gpu in gpus)


def test_a_sequence_enters_once(device_engine: Path, gpus: list[FakeDevice]) -> None:
    with LLM(device_engine, kv_cache_blocks=60) as llm:
        params = SamplingParams(max_tokens=20, temperature=0, presence_penalty=0.5, ignore_eos=True)
        llm.generate([[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12]], params)
    entered = [each for each in gpus[0].launched if each.symbol == "s_enter"]
    assert len(entered) == 1 + 2, "seven ids at most go at once"


def test_warm_up_captures_each_way_of_sampling(device_engine: Path, gpus: list[FakeDevice]) -> None:
    executor = CudaExecutor(open_engine(device_engine), num_blocks=20)
    executor.warm_up()
    assert gpus[0].captures == 3 * len(executor.captured)
    executor.close()


def test_a_decoding_batch_that_stays_as_it_is_costs_one_copy_and_one_graph(
    device_engine: Path, gpus: list[FakeDevice]
) -> None:
    per_step = []
    with LLM(device_engine, kv_cache_blocks=60) as llm:
        (gpu,) = gpus
        execute, before = llm._core._executor.execute_async, (0, 0, 0)  # type: ignore[attr-defined]

        def counted(*given: Any) -> Any:
            nonlocal before
            pending, after = execute(*given), (len(gpu.uploads), len(gpu.graphs_launched), len(gpu.launched))
            per_step.append(tuple(now - then for now, then in zip(after, before, strict=True)))
            before = after
            return pending

        llm._core._executor.execute_async = counted  # type: ignore[attr-defined]
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    kernels = {launches for _, _, launches in per_step[4:-1]}
    assert {copies for copies, _, _ in per_step[4:-1]} == {1}, "of the step's inputs: the tokens are there already"
    assert {graphs for _, graphs, _ in per_step[4:-1]} == {1}
    assert len(kernels) == 1, "those in the graph, the one that feeds tokens among them"


def batch(rows: int = 1, num_tokens: int | None = None, **extra: Any) -> SamplingBatch:
    made = SamplingBatch.greedy(rows)
    return made._replace(extras=(RowExtras(**extra),) if extra else None, num_tokens=num_tokens)


def test_what_the_kernels_cannot_hold_goes_to_the_host(device_engine: Path, gpus: list[FakeDevice]) -> None:
    executor = CudaExecutor(open_engine(device_engine), num_blocks=20)
    choose = executor._sampler.choose  # type: ignore[union-attr]
    assert choose(batch()) == Choice("greedy", False, False)
    assert choose(batch(logprobs=MOST_LOGPROBS)) == Choice("greedy", True, False)
    assert choose(batch(logprobs=MOST_LOGPROBS + 1)) is None
    assert choose(batch(banned=np.arange(ENTRIES))) == Choice("adjusted", False, False)
    assert choose(batch(banned=np.arange(ENTRIES + 1))) is None
    assert choose(batch(num_tokens=VOCAB)) is not None
    assert choose(batch(num_tokens=VOCAB - 1)) is None
    executor.close()


def test_logits_that_are_not_finite(device_engine: Path, gpus: list[FakeDevice]) -> None:
    with LLM(device_engine, kv_cache_blocks=20) as llm:

        def spoil(device: FakeDevice, grid: Any, given: bytes) -> None:
            logits = int.from_bytes(given[48:56], "little")
            device.view(logits, 4 * VOCAB).view(np.float32)[:] = np.nan

        gpus[0].kernels["hash"] = spoil
        with pytest.raises(LLMBuildError, match="logits are not finite"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))


def test_count_rows() -> None:
    rows = CountRows(2)
    tokens = np.arange(10)
    first, second, third = tokens[3:5], np.arange(7)[2:4], np.arange(8)[:1]
    a, new = rows.take(first)
    assert new
    assert rows.take(tokens[3:6]) == (a, False), "the device has counted the token between"
    assert rows.take(tokens[3:8]) == (a, True), "it has not"
    b, new = rows.take(second)
    assert new and b != a
    assert rows.take(third) == (a, True), "the row that was not used for longest"
    assert rows.take(tokens[3:9]) == (b, True)


def test_greedy_steps_bring_nothing_but_tokens(device_engine: Path, gpus: list[FakeDevice]) -> None:
    prompt = list(range(TOKENS + 9))
    with LLM(device_engine, kv_cache_blocks=40) as llm:
        downloads: list[int] = []
        gpu, real = gpus[0], gpus[0].download

        def download(target: int, source: int, num_bytes: int, stream: Any) -> None:
            downloads.append(num_bytes)
            real(target, source, num_bytes, stream)

        gpu.download = download  # type: ignore[method-assign]
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    tokens = list(prompt)
    for _ in range(5):
        tokens.append(int(reference_logits(np.array(tokens), VOCAB)[0].argmax()))
    assert list(output.outputs[0].token_ids) == tokens[len(prompt) :]
    assert {each.symbol for each in gpu.launched} == {"store", "hash", "s_greedy", "s_feed"}
    assert set(downloads) == {256 + 4 * BATCH}  # token ids, padded, and their status


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_fed_to_the_next_step_on_the_device(
    device_engine: Path, gpus: list[FakeDevice], temperature: float
) -> None:
    executor = CudaExecutor(open_engine(device_engine), num_blocks=20)
    sampling = SamplingBatch.greedy(3)._replace(
        temperature=np.full(3, temperature, np.float32),
        all_greedy=temperature == 0,
        seeds=np.arange(3, dtype=np.uint64),
    )
    assert executor.can_overlap(sampling)
    assert not executor.can_overlap(batch(output=np.arange(3), prompt=np.arange(2)))
    prompts, blocks = [[1, 2, 3], [4], [5, 6]], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    sequences = [list(prompt) for prompt in prompts]
    waiting = executor.execute_async(step(*((s, len(s), b) for s, b in zip(sequences, blocks, strict=True))), sampling)
    order = np.array([2, 0, 1], np.int32)  # rows change places between the steps
    for number in range(1, 6):
        for sequence in sequences:
            sequence.append(63)  # a token that the host does not know yet
        sequences, blocks = [sequences[i] for i in order], [blocks[i] for i in order]
        sampling = sampling._replace(seeds=sampling.seeds[order], token_indices=np.full(3, number, np.int32))
        following = executor.execute_async(
            step(*((s, 1, b) for s, b in zip(sequences, blocks, strict=True))), sampling, order
        )
        tokens = waiting.result().token_ids
        for sequence, row in zip(sequences, order, strict=True):
            sequence[-1] = int(tokens[row])
        waiting = following
    waiting.result()
    executor.close()
    for sequence in sequences:
        prompt = next(p for p in prompts if sequence[: len(p)] == p)
        for end in range(len(prompt), len(sequence)):
            row = SamplingBatch.greedy(1)._replace(
                temperature=np.full(1, temperature, np.float32),
                all_greedy=temperature == 0,
                seeds=np.array([prompts.index(prompt)], np.uint64),
                token_indices=np.array([end - len(prompt)], np.int32),
            )
            logits = reference_logits(np.array(sequence[:end]), VOCAB)
            assert sample(logits, row).token_ids[0] == sequence[end]
