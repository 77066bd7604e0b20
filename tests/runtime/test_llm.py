from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers

from llmbuild.errors import EngineError, LLMBuildError, RequestError
from llmbuild.runtime.executors.registry import EXECUTORS, load_executor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.llm import LLM
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.runtime.tokenizer import Tokenizer
from support.fake_executor import FakeExecutor, reference_logits
from support.reference_runtime import run_alone
from support.tiny_tokenizers import BYTE_VOCAB_SIZE, EOS, byte_definition

LIMITS = ServingLimits(
    max_batch_size=4, max_num_tokens=16, max_seq_len=64, vocab_size=BYTE_VOCAB_SIZE, eos_token_ids=(EOS,)
)
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ extra }}"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def make_llm(*, num_blocks: int = 64, limits: ServingLimits = LIMITS, tokenizer: bool = True, **files) -> LLM:
    text = Tokenizer(byte_definition(), **files) if tokenizer else None
    return LLM.over(FakeExecutor(limits, num_blocks=num_blocks, block_size=4), limits, text)


def free_blocks(llm: LLM) -> int:
    assert llm._core is not None
    return llm._core.num_free_blocks


def alone(prompt: list[int], params: SamplingParams, *, index: int = 0, max_tokens: int = 8):
    library = tokenizers.Tokenizer.from_str(byte_definition())
    return run_alone(
        prompt, params, index=index, max_tokens=max_tokens, vocab_size=LIMITS.vocab_size, eos=(EOS,), tokenizer=library
    )


def test_prompts_in_every_form() -> None:
    llm = make_llm()
    ids = [*b"hello"]
    for prompts in ("hello", ids, ["hello"], [ids], np.array(ids), tuple(ids)):
        [output] = llm.generate(prompts, GREEDY)
        assert output.prompt_token_ids == ids and output.finished
        assert output.outputs[0].token_ids == alone(ids, SamplingParams(temperature=0, seed=0)).token_ids
    assert llm.generate("hello", GREEDY)[0].prompt == "hello" and llm.generate(ids, GREEDY)[0].prompt is None
    assert llm.generate([], GREEDY) == []
    assert [o.prompt_token_ids for o in llm.generate(["a", [98], "c"], GREEDY)] == [[97], [98], [99]]


@pytest.mark.parametrize("prompts", [{"prompt": "x"}, 5, None, (p for p in "ab"), {1, 2}])
def test_prompts_of_another_kind(prompts) -> None:
    with pytest.raises(RequestError, match=f"prompts is {type(prompts).__name__}"):
        make_llm().generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="must be a list of integers"):
        make_llm().generate([{"prompt": "x"}], GREEDY)


def test_params_for_all_or_for_each() -> None:
    llm = make_llm()
    one, two = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, ignore_eos=True)])
    assert len(one.outputs[0].token_ids) == 1 and len(two.outputs[0].token_ids) == 3
    with pytest.raises(RequestError, match="2 prompts, but 1 params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="params is dict"):
        llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="params is dict"):
        llm.generate("a", [{"temperature": 0}])  # type: ignore[list-item]


def test_n_completions_are_independent_and_reproducible() -> None:
    llm = make_llm(num_blocks=20)
    params = SamplingParams(n=6, seed=5, max_tokens=8, ignore_eos=True)
    [output] = llm.generate([[1, 2, 3]], params)
    assert [c.index for c in output.outputs] == list(range(6))
    found = [c.token_ids for c in output.outputs]
    assert found == [alone([1, 2, 3], params, index=i).token_ids for i in range(6)]
    assert len({tuple(ids) for ids in found}) == 6
    assert [c.token_ids for c in llm.generate([[9], [1, 2, 3]], params)[1].outputs] == found


def test_without_seed_two_calls_differ() -> None:
    llm, params = make_llm(), SamplingParams(max_tokens=20, ignore_eos=True)
    assert llm.generate("a", params)[0].outputs[0].token_ids != llm.generate("a", params)[0].outputs[0].token_ids


def test_everything_is_checked_before_anything_runs() -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(["fine", ""], GREEDY)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.stream("", GREEDY)  # at once, not at the first output
    assert llm._core is not None and not llm._core.has_work and not llm._inbox


def test_stream_is_cumulative_with_what_is_new() -> None:
    llm, params = make_llm(), SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True)
    [whole] = llm.generate("hi", params)
    text, ids = "", []
    for output in llm.stream("hi", params):
        [completion] = output.outputs
        text, ids = text + completion.new_text, ids + completion.new_token_ids
        assert (completion.text, completion.token_ids) == (text, ids)
        assert output.finished == (completion.finish_reason is not None)
    assert (text, ids) == (whole.outputs[0].text, whole.outputs[0].token_ids) and len(ids) == 12
    assert whole.outputs[0].new_text == text


def test_streams_may_be_read_in_turns_and_left() -> None:
    llm, params = make_llm(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone_a, alone_b = (llm.generate(p, params)[0].outputs[0].token_ids for p in ("aa", "bb"))
    a, b, c = llm.stream("aa", params), llm.stream("bb", params), llm.stream("cc", LONG)
    next(c)
    seen = [(next(a).outputs[0].token_ids, next(b).outputs[0].token_ids) for _ in range(6)]
    assert seen[-1] == (alone_a, alone_b)
    assert free_blocks(llm) < 64
    c.close()
    assert free_blocks(llm) == 64
    assert list(a) == list(b) == [] and not llm._inbox


def test_an_exception_leaves_nothing_behind() -> None:
    llm = make_llm()
    llm._core._executor.fail_at_step = 3
    with pytest.raises(RuntimeError, match="fell off the bus"):
        llm.generate(["a", "b"], SamplingParams(max_tokens=20, ignore_eos=True))
    assert free_blocks(llm) == 64 and not llm._core.has_work and not llm._inbox
    assert len(llm.generate("a", GREEDY)) == 1


def stop_at(text: str, **params) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=text, **params)


def test_stop_string_and_stop_token() -> None:
    """The model is a hash: its own greedy text is used to choose where to stop."""
    limits = LIMITS._replace(vocab_size=128)
    llm = make_llm(limits=limits)
    [free] = llm.generate("q", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    assert free.outputs[0].finish_reason == "length" and free.outputs[0].stop_reason is None and len(text) == 8
    stop = text[3:5]
    [cut] = llm.generate("q", stop_at(stop))
    assert cut.outputs[0].text == text[:3] and cut.outputs[0].token_ids == ids[:5]
    assert cut.outputs[0].finish_reason == "stop" and cut.outputs[0].stop_reason == stop
    [kept] = llm.generate("q", stop_at(stop, include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[:5]
    at = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[ids[4]])
    [token] = llm.generate("q", at)
    assert token.outputs[0].token_ids == ids[: ids.index(ids[4]) + 1] and token.outputs[0].stop_reason == ids[4]
    assert token.outputs[0].text == text[: ids.index(ids[4])]
    shown = list(llm.stream("q", stop_at(stop)))
    assert all(text[:3].startswith(o.outputs[0].text) for o in shown)


def test_end_of_sequence_and_min_tokens() -> None:
    limits = LIMITS._replace(vocab_size=6, eos_token_ids=(1, 4))
    llm = make_llm(limits=limits)
    params = SamplingParams(temperature=0)
    [output] = llm.generate([[0, 3]], params)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and completion.stop_reason is None and completion.token_ids[-1] in (1, 4)
    [later] = llm.generate([[0, 3]], SamplingParams(temperature=0, min_tokens=20))
    assert len(later.outputs[0].token_ids) > 20 and not {1, 4} & set(later.outputs[0].token_ids[:20])
    [longest] = llm.generate([[0, 3]], SamplingParams(temperature=0, ignore_eos=True))
    assert len(longest.outputs[0].token_ids) == 62 and longest.outputs[0].finish_reason == "length"


def test_logprobs() -> None:
    llm = make_llm()
    [output] = llm.generate(
        [[1, 2]], SamplingParams(temperature=1.5, seed=0, max_tokens=3, logprobs=2, ignore_eos=True)
    )
    completion = output.outputs[0]
    assert len(completion.logprobs) == 3
    logits = reference_logits(np.array([1, 2]), LIMITS.vocab_size)[0].astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum())
    first, token = completion.logprobs[0], completion.token_ids[0]
    assert set(first) == {token, *np.argsort(-exact)[:2].tolist()}
    for entry, found in first.items():
        assert found.logprob == pytest.approx(exact[entry], abs=1e-5)
        assert found.rank == 1 + (exact > exact[entry]).sum()
        assert found.decoded_token == bytes([entry]).decode("utf-8", "replace")
    total = sum(entry[t].logprob for entry, t in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert llm.generate("a", GREEDY)[0].outputs[0].logprobs is None


def test_metrics() -> None:
    [output] = make_llm().generate("a", GREEDY)
    assert 0 < output.metrics.first_token_s <= output.metrics.finished_s


def test_chat() -> None:
    llm = make_llm(chat_template=TEMPLATE)
    hello = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(hello, GREEDY)
    assert bytes(one.prompt_token_ids) == b"user:hi;"
    two = llm.chat([hello, [*hello, {"role": "assistant", "content": "yo"}]], GREEDY, extra="!")
    assert [bytes(o.prompt_token_ids) for o in two] == [b"user:hi;!", b"user:hi;assistant:yo;!"]
    *_, last = llm.stream_chat(hello, GREEDY)
    assert last.outputs[0].token_ids == one.outputs[0].token_ids
    with pytest.raises(RequestError, match="the model has no chat template"):
        make_llm().chat(hello)
    with pytest.raises(RequestError, match="needs a list of messages"):
        llm.chat([])


def test_without_tokenizer() -> None:
    llm = make_llm(tokenizer=False)
    [output] = llm.generate([[1, 2]], GREEDY)
    assert output.outputs[0].text == "" and output.outputs[0].token_ids
    with pytest.raises(RequestError, match="this engine has no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([[1]], SamplingParams(stop="x"))


def test_default_params_come_from_the_model() -> None:
    llm = make_llm(generation_config={"temperature": 0.6, "top_p": 0.9, "eos_token_id": 5, "top_k": None})
    assert llm.default_params == SamplingParams(temperature=0.6, top_p=0.9)
    with pytest.raises(LLMBuildError, match=r"generation_config.json holds a bad default: top_p is 7"):
        make_llm(generation_config={"top_p": 7})


def test_close() -> None:
    with make_llm() as llm:
        executor = llm._core._executor
        stream = llm.stream("a", GREEDY)
        next(stream)
    assert executor.closed
    llm.close()
    with pytest.raises(LLMBuildError, match="this LLM is closed"):
        llm.generate("a")
    with pytest.raises(LLMBuildError, match="this LLM is closed"):
        next(stream)


class Named:
    """As much of an engine as the registry looks at."""

    def __init__(self, target: str) -> None:
        self.path = "engine"
        self.manifest = self.target = self
        self.name = target


def test_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(EngineError) as caught:
        load_executor(Named("cpuu"))
    assert "the target 'cpuu', which this version cannot run" in caught.value.what
    assert "did you mean 'cpu'?" in caught.value.hint and "known: cpu" in caught.value.hint


def test_the_registry_passes_what_is_given(monkeypatch) -> None:
    monkeypatch.setitem(EXECUTORS, "json", f"{json.__name__}:JSONEncoder")
    monkeypatch.setattr(json, "JSONEncoder", lambda engine, **options: (engine, options))
    engine = Named("json")
    assert load_executor(engine, threads=2, num_blocks=None) == (engine, {"threads": 2})
