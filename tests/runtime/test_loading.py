"""From an engine directory on disk to tokens, with a fake executor in the place of the target's."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

from llmbuild import LLM, AsyncLLM, SamplingParams
from llmbuild.errors import ConfigError, EngineError, RequestError
from llmbuild.runtime.executors.registry import EXECUTORS
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.loading import load_engine
from support.fake_engine import PAYLOAD, write_engine
from support.fake_executor import FakeExecutor
from support.tiny_tokenizers import byte_definition


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine of the fake target: vocabulary 64, sequences of 64 tokens, end of sequence 2."""

    def construct(engine, *, num_blocks: int = 16, threads: int | None = None) -> FakeExecutor:
        executor = FakeExecutor(ServingLimits.of(engine.manifest), num_blocks=num_blocks, block_size=4)
        executor.threads = threads
        return executor

    module = types.ModuleType("fake_target")
    module.construct = construct
    monkeypatch.setitem(sys.modules, "fake_target", module)
    monkeypatch.setitem(EXECUTORS, "cpu", "fake_target:construct")
    payload = {
        **PAYLOAD,
        "tokenizer/tokenizer.json": byte_definition().encode(),
        "tokenizer/generation_config.json": b'{"temperature": 0.0}',
        "tokenizer/chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    write_engine(tmp_path / "engine", payload=payload)
    return tmp_path / "engine"


def test_load(engine) -> None:
    loaded = load_engine(engine, num_threads=2, kv_cache_blocks=9)
    assert loaded.limits == ServingLimits(4, 32, 64, 64, (2,))
    assert (loaded.executor.num_blocks, loaded.executor.threads) == (9, 2)
    assert loaded.tokenizer is not None and loaded.tokenizer.has_chat_template


def test_generate_stream_and_chat_from_disk(engine) -> None:
    with LLM(engine) as llm:
        assert llm.default_params == SamplingParams(temperature=0)
        [output] = llm.generate("!!", SamplingParams(temperature=0, max_tokens=5))
        *_, last = llm.stream("!!", SamplingParams(temperature=0, max_tokens=5))
        [answer] = llm.chat([{"role": "user", "content": "!!"}], SamplingParams(temperature=0, max_tokens=5))
    assert output.outputs[0].token_ids == last.outputs[0].token_ids == answer.outputs[0].token_ids

    async def main() -> list[int]:
        async with AsyncLLM(engine) as asynchronous:
            async for out in asynchronous.chat(
                [{"role": "user", "content": "!!"}], SamplingParams(max_tokens=5, temperature=0)
            ):
                ids = out.outputs[0].token_ids
        return ids

    assert asyncio.run(main()) == output.outputs[0].token_ids


def test_text_outside_the_model_s_vocabulary(engine) -> None:
    with LLM(engine) as llm, pytest.raises(RequestError, match="the prompt holds the token id 97"):
        llm.generate("a")


def test_an_engine_without_tokenizer_takes_ids(tmp_path, engine) -> None:
    payload = {name: content for name, content in PAYLOAD.items() if not name.startswith("tokenizer")}
    write_engine(tmp_path / "bare", payload=payload)
    with LLM(tmp_path / "bare") as llm:
        assert llm.generate([[1, 2]])[0].finished
        with pytest.raises(RequestError, match="this engine has no tokenizer"):
            llm.generate("x")


@pytest.mark.parametrize("option", ["num_threads", "kv_cache_blocks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_wrong_options(engine, option, value) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(engine, **{option: value})
    assert caught.value.what == f"{option} is {value!r}"


@pytest.mark.parametrize("value", [-1, 0.0, True])
def test_a_device_that_is_no_number_of_a_gpu(engine, value) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(engine, device=value)
    assert caught.value.what == f"device is {value!r}"


@pytest.mark.parametrize("option", ["device", "kv_memory_fraction"])
def test_an_option_of_another_target(engine, option) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(engine, **{option: 1})
    assert caught.value.what == f"the cpu target has no option {option!r}"
    assert caught.value.hint == "known: num_blocks, threads"


def test_damage_is_found_before_the_executor_is_made(engine, monkeypatch) -> None:
    monkeypatch.setitem(EXECUTORS, "cpu", "no_such_module:Nothing")
    (engine / "plan" / "model.onnx").write_bytes(b"short")
    with pytest.raises(EngineError, match=r"plan/model.onnx"):
        LLM(engine)
