"""The cuda executor on a GPU made of numpy: right tokens whatever the batch, graphs reused, everything freed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbuild.cuda.calls import CudaError
from llmbuild.engine.reader import open_engine
from llmbuild.errors import ConfigError, LLMBuildError
from llmbuild.runtime.executors.cuda import load as load_module
from llmbuild.runtime.executors.cuda.executor import CudaExecutor
from llmbuild.runtime.executors.registry import load_executor
from llmbuild.runtime.llm import LLM
from llmbuild.runtime.sampling_batch import SamplingBatch
from llmbuild.runtime.sampling_params import SamplingParams
from support.cuda_engine import BATCH, BLOCK, TOKENS, VOCAB, fake_gpu, step, write_cuda_engine
from support.fake_device import FakeDevice
from support.fake_executor import reference_logits


@pytest.fixture
def engine_path(tmp_path: Path) -> Path:
    return write_cuda_engine(tmp_path / "engine")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = fake_gpu()
    monkeypatch.setattr(load_module, "Device", lambda ordinal: device)
    return device


def load(path: Path, **options: Any) -> CudaExecutor:
    executor = load_executor(open_engine(path), **options)
    assert isinstance(executor, CudaExecutor)
    return executor


def expected(*tokens: list[int]) -> np.ndarray:
    return np.concatenate([reference_logits(np.array(each), VOCAB) for each in tokens])


@pytest.mark.parametrize("graphs", [True, False])
def test_prefill_and_padded_decode_give_the_reference_logits(engine_path: Path, gpu: FakeDevice, graphs: bool) -> None:
    executor = load(engine_path, num_blocks=20, graphs=graphs)
    a, b, c = [3, 1, 4, 1, 5], [9, 2], [6]
    found = executor.forward(step((a, 5, [7, 3]), (b, 2, [0]), (c, 1, [19])))
    np.testing.assert_array_equal(found, expected(a, b, c))
    for token in (11, 12, 13, 14):  # 3 sequences in a graph of 4
        a, b, c = [*a, token], [*b, token + 20], [*c, token + 40]
        found = executor.forward(step((a, 1, [7, 3, 5]), (b, 1, [0, 2]), (c, 1, [19, 1])))
        np.testing.assert_array_equal(found, expected(a, b, c))
    executor.close()
    assert gpu.closed


def test_a_bucket_is_captured_once_and_then_only_launched(engine_path: Path, gpu: FakeDevice) -> None:
    executor = load(engine_path, num_blocks=20)
    sequences = [([1, 2, row], 1, [row]) for row in range(4)]
    for count in (3, 3, 4, 1, 3):
        executor.forward(step(*sequences[:count]))
    assert executor.captured == (1, 4)
    assert gpu.captures == 2
    assert len(gpu.graphs_launched) == 3  # the first step of each bucket runs op by op
    executor.close()


def test_mixed_steps_are_not_captured(engine_path: Path, gpu: FakeDevice) -> None:
    executor = load(engine_path, num_blocks=20)
    executor.forward(step(([1, 2, 3], 2, [0]), ([5, 6], 1, [1])))
    assert gpu.captures == 0
    assert [each.symbol for each in gpu.launched] == ["store", "hash"]
    executor.close()


def test_warm_up_captures_every_bucket_and_touches_the_dummy_block_alone(engine_path: Path, gpu: FakeDevice) -> None:
    executor = load(engine_path, num_blocks=20)
    executor.warm_up()
    assert executor.captured == (1, 2, 4, BATCH)
    pool = max(gpu.blocks.values(), key=lambda block: len(block) == 21 * BLOCK * 8).view(np.uint64)
    assert not pool[: 20 * BLOCK].any() and pool[20 * BLOCK] != 0
    before = gpu.captures
    executor.forward(step(([1, 2], 1, [0])))
    assert gpu.captures == before
    executor.close()


def test_a_chunk_that_wants_no_logits(engine_path: Path, gpu: FakeDevice) -> None:
    executor = load(engine_path, num_blocks=20)
    assert executor.forward(step(([1, 2, 3], 3, [0]), wanted=[])).shape == (0, VOCAB)
    assert [each.symbol for each in gpu.launched] == ["store"], "an empty grid is not launched"
    assert executor.forward(step(([1, 2, 3, 4], 1, [0]), wanted=[])).shape == (0, VOCAB)
    np.testing.assert_array_equal(
        executor.forward(step(([1, 2, 3, 4, 5], 1, [0, 1]), ([7], 1, [2]), wanted=[1])), expected([7])
    )
    executor.close()


def test_logits_of_more_tokens_than_a_step_has_sequences(engine_path: Path, gpu: FakeDevice) -> None:
    executor = load(engine_path, num_blocks=20)
    tokens = list(range(9))
    found = executor.forward(step((tokens, 9, [0, 1, 2]), wanted=list(range(9))))
    np.testing.assert_array_equal(found, expected(*(tokens[: end + 1] for end in range(9))))
    executor.close()


def test_tokens_are_sampled(engine_path: Path, gpu: FakeDevice) -> None:
    executor = load(engine_path, num_blocks=20)
    done = executor.execute(step(([1, 2, 3], 3, [0]), ([4], 1, [1])), SamplingBatch.greedy(2))
    np.testing.assert_array_equal(done.token_ids, expected([1, 2, 3], [4]).argmax(axis=1))
    executor.close()


def test_serving_through_the_scheduler_equals_the_reference(
    engine_path: Path, gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(engine_path, kv_cache_blocks=16)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 9, TOKENS - 1, 30, 2, 17, 5, 3)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(reference_logits(np.array(tokens), VOCAB)[0].argmax()))
        assert list(output.outputs[0].token_ids) == tokens[len(prompt) :]
    llm.close()
    assert gpu.closed and gpu.graphs_launched


def test_a_failure_names_its_op(engine_path: Path, gpu: FakeDevice) -> None:
    executor = load(engine_path, num_blocks=20, graphs=False, wait=True)

    def fail(device: FakeDevice, grid: Any, given: bytes) -> None:
        def report(stream: Any) -> None:
            raise CudaError("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", "")

        device.synchronize = report  # type: ignore[method-assign]

    gpu.kernels["hash"] = fail
    with pytest.raises(LLMBuildError, match=r"op 2, hash \(logits\) failed: .*ILLEGAL_ADDRESS") as caught:
        executor.forward(step(([1, 2, 3], 3, [0])))
    assert caught.value.where == "{'T': 3, 'B': 1, 'L': 1, 'S': 3}"
    del gpu.synchronize  # type: ignore[attr-defined]
    executor.close()


def test_options_reach_the_executor(engine_path: Path, gpu: FakeDevice) -> None:
    with pytest.raises(ConfigError, match="kv_memory_fraction is 2"):
        LLM(engine_path, kv_memory_fraction=2)
    with pytest.raises(ConfigError, match="the cuda target has no option 'threads'"):
        LLM(engine_path, num_threads=2)
    most = 6 * 12  # blocks of all sequences at their longest
    with LLM(engine_path, kv_memory_fraction=0.5, device=0):
        assert (most + 1) * BLOCK * 8 in map(len, gpu.blocks.values())


def test_random_weights_read_no_file(engine_path: Path, gpu: FakeDevice) -> None:
    engine = open_engine(engine_path)
    unlisted = [file for file in engine.manifest.files if not file.path.startswith("weights/")]
    engine = replace(engine, manifest=engine.manifest.model_copy(update={"files": unlisted}))
    executor = load_executor(engine, random_weights=True, num_blocks=20)
    found = executor.forward(step(([1, 2, 3], 3, [0])))
    assert np.isfinite(found).all() and not np.array_equal(found, expected([1, 2, 3]))
    executor.close()


def test_a_failed_load_frees_everything(engine_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_gpu()
    monkeypatch.setattr(load_module, "Device", lambda ordinal: device)
    calls = []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(device.used)
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(load_module.weights, "upload", fail)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        load(engine_path)
    assert calls[0] > 0 and device.closed
