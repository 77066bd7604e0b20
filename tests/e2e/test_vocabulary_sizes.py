"""From checkpoint to text where tokenizer and model disagree about the vocabulary, and where several ids end a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llmbuild import LLM, BuildConfig, SamplingParams, build
from llmbuild.engine.reader import open_engine
from llmbuild.errors import RequestError
from support.tiny_models import VOCAB_SIZE, save_tiny, tiny_model


def convert(directory: Path, engine: Path) -> Path:
    build(BuildConfig(model=directory, output=engine, target="cpu", max_batch_size=4, max_seq_len=64))
    return engine


def test_a_tokenizer_smaller_than_the_model(tmp_path: Path) -> None:
    """The rows beyond the tokenizer hold the highest logits, and are never sampled nor given a probability."""
    model = tiny_model("llama", vocab_size=VOCAB_SIZE + 32)
    with torch.no_grad():
        model.lm_head.weight[VOCAB_SIZE:] *= 50
    engine = convert(save_tiny(model, tmp_path / "m"), tmp_path / "e")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
    with LLM(engine) as llm:
        [result] = llm.generate(["the cat and"], params)
        [drawn] = llm.generate(["the cat and"], SamplingParams(temperature=2.0, seed=1, max_tokens=12, ignore_eos=True))
        # Ids of padding rows may be in a prompt: they have embeddings.
        [padded] = llm.generate([[VOCAB_SIZE + 3, 5]], params)
    for completion in (result.outputs[0], drawn.outputs[0], padded.outputs[0]):
        assert len(completion.token_ids) == 12 and max(completion.token_ids) < VOCAB_SIZE
        assert isinstance(completion.text, str)


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    """Text whose tokens the model has works; a token beyond its embeddings is refused by name."""
    directory = save_tiny(tiny_model("llama", vocab_size=270), tmp_path / "m")
    engine = convert(directory, tmp_path / "e")
    with LLM(engine) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [result] = llm.generate(["xyz"], params)
        assert len(result.outputs[0].token_ids) == 8
        with pytest.raises(RequestError, match=r"the prompt holds the token id \d+, but the vocabulary has 270 tokens"):
            llm.generate(["the cat and"], params)
        [after] = llm.generate(["xyz"], params)
        assert after.outputs[0].token_ids == result.outputs[0].token_ids


def test_every_end_token_of_the_generation_config_ends_a_text(tmp_path: Path) -> None:
    directory = save_tiny(tiny_model("llama"), tmp_path / "m")
    with LLM(convert(directory, tmp_path / "free")) as llm:
        prompt = [5, 6, 7]
        [free] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tokens = list(free.outputs[0].token_ids)
    end = tokens[4]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [299, end, 256]}))
    engine = convert(directory, tmp_path / "e")
    assert open_engine(engine).manifest.model.eos_token_ids == [299, end, 256]
    with LLM(engine) as llm:
        [stopped] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12))
    assert stopped.outputs[0].finish_reason == "stop"
    assert list(stopped.outputs[0].token_ids)[: tokens.index(end)] == tokens[: tokens.index(end)]
    assert len(stopped.outputs[0].token_ids) <= tokens.index(end) + 1
