"""The executor over a whole engine directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmbuild import BuildConfig, build
from llmbuild.builder.targets.cpu import native_library
from llmbuild.engine.reader import Engine, open_engine
from llmbuild.errors import EngineError
from llmbuild.runtime.executors import cpu_session
from llmbuild.runtime.executors.cpu import CpuExecutor, default_blocks
from support.cpu_engines import Conversation, needs_compiler, scenario
from support.tiny_models import save_tiny, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_model("mistral"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=needs_compiler)], ids=["dense", "paged"])
def engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    out = tmp_path_factory.mktemp("engine") / "engine"
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setenv(native_library.VARIABLE, "none")
        build(BuildConfig(model, out, target="cpu", max_batch_size=4, max_num_tokens=64, max_seq_len=128))
    engine = open_engine(out)
    assert engine.manifest.target.section["attention"] == ("paged" if request.param else "dense")
    return engine


def test_a_mixed_step_equals_its_sequences_one_by_one(engine: Engine) -> None:
    together, apart = (CpuExecutor(engine, num_blocks=64, threads=2) for _ in range(2))
    both = Conversation(block_size=16)
    single = {name: Conversation(block_size=16, num_blocks=20, first_block=20 * i) for i, name in enumerate("abc")}
    for chunks in scenario():
        mixed = together.forward(both.step(chunks))
        alone = [apart.forward(single[name].step({name: tokens})) for name, tokens in chunks.items()]
        assert np.abs(mixed - np.concatenate(alone)).max() < 1e-4


def test_only_the_rows_asked_for_in_their_order(engine: Engine) -> None:
    executor = CpuExecutor(engine, num_blocks=64, threads=2)
    step = Conversation(block_size=16).step({"a": [1, 2, 3, 4], "b": [5], "c": [6, 7]})
    everything = executor.forward(step)
    for rows in ([6, 0, 4], [3], []):
        some = executor.forward(step._replace(logits_indices=np.array(rows, np.int32)))
        assert some.shape == (len(rows), everything.shape[1])
        assert np.allclose(some, everything[rows], atol=1e-5)


def test_forward_returns_an_array_of_its_own(engine: Engine) -> None:
    executor = CpuExecutor(engine, num_blocks=64, threads=2)
    conversation = Conversation(block_size=16)
    first = executor.forward(conversation.step({"a": [1]}))
    kept = first.copy()
    executor.forward(conversation.step({"a": [2]}))
    assert np.array_equal(first, kept)


def test_default_blocks_fit_the_limits_and_the_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmbuild.runtime.executors import cpu

    assert default_blocks(engine.manifest) == 4 * 128 // 16
    monkeypatch.setattr(cpu, "available_memory", lambda: 0)
    assert default_blocks(engine.manifest) == 128 // 16  # one sequence of the full length at least


def test_a_processor_without_the_features(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_session, "processor_features", lambda: frozenset({"avx2"}))
    if engine.manifest.target.section["native"] is None:  # this engine runs anywhere
        CpuExecutor(engine, num_blocks=8).close()
        return
    with pytest.raises(EngineError, match="this processor lacks f16c, fma") as caught:
        CpuExecutor(engine, num_blocks=8)
    assert "LLMBUILD_CXX=none" in str(caught.value)


def test_the_executor_needs_neither_torch_nor_transformers(engine: Engine) -> None:
    program = f"""
import sys
from pathlib import Path
import numpy as np
from llmbuild.engine.reader import open_engine
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.registry import load_executor
executor = load_executor(open_engine(Path({str(engine.path)!r})), num_blocks=8)
array = lambda *values: np.array(values, np.int32)
step = StepInput(array(5), array(0), array(16), array([1]), array(1), array(0, 1), array(0))
assert executor.forward(step).shape == (1, 288)
loaded = {{"torch", "transformers", "onnx", "llmbuild.builder"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
