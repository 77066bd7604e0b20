"""The real SmolLM2 GGUF: every tensor, the tokenizer, the logits."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from llmbuild.builder.frontend.load import load_program, open_source
from support.parity import relative_error
from support.texts import TEXTS
from support.tiny_gguf import gguf_name, permute

CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def source(smollm2_gguf):
    return open_source(smollm2_gguf)


@pytest.fixture(scope="module")
def tokenizer(source):
    return Tokenizer.from_str(source.tokenizer_files["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def expected(smollm2_gguf):
    """GGUF tensor name -> float32 values as gguf-py dequantizes them, rows as stored."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        for tensor in gguf.GGUFReader(smollm2_gguf).tensors
    }


def test_every_tensor_is_what_gguf_py_reads(source, expected):
    names = source.checkpoint.names()
    assert {gguf_name(name) for name in names} == set(expected) and len(names) == 272
    heads = {"q_proj": source.config.num_attention_heads, "k_proj": source.config.num_key_value_heads}
    for name in names:
        value = source.checkpoint.weight(name).load().numpy()
        count = next((count for word, count in heads.items() if word in name), None)
        stored = permute(value, count) if count else value
        assert np.array_equal(stored, expected[gguf_name(name)]), name


def test_blocks_are_kept(source):
    formats = {name: source.checkpoint.weight(name).block_format for name in source.checkpoint.names()}
    kinds = [form.source if form else "plain" for form in formats.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"Q4_1": 210, "Q8_0": 1, "plain": 61}
    assert formats["model.embed_tokens.weight"].source == "Q8_0"


def test_config(source):
    config = source.config
    assert (config.num_hidden_layers, config.head_dim, config.rms_norm_eps) == (30, 64, 1e-5)
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 100000.0
    assert source.generation == {"bos_token_id": 1, "eos_token_id": [2]}


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_chat_markers_are_single_tokens(tokenizer):
    ids = tokenizer.encode(CHAT).ids
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == CHAT


def test_digits_stand_alone(tokenizer):
    assert tokenizer.encode("x1234").tokens == ["x", "1", "2", "3", "4"]


@pytest.mark.slow
def test_ids_equal_the_tokenizer_of_transformers(smollm2_gguf, tokenizer):
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    for text in [*TEXTS, CHAT]:
        if "½" in text:
            continue  # transformers does not cut numerals apart when it reads a GGUF; the original tokenizer does
        assert tokenizer.encode(text).ids == theirs(text).input_ids


@pytest.fixture(scope="module")
def reference(source, expected):
    """The transformers model with gguf-py's values, independent of our reader of blocks."""
    model = LlamaForCausalLM(source.config).eval()
    state = {}
    for name in model.state_dict():
        value = expected.get(gguf_name(name))
        if value is None:
            continue  # the tied head
        if "q_proj" in name or "k_proj" in name:
            count = source.config.num_attention_heads if "q_proj" in name else source.config.num_key_value_heads
            value = value[np.argsort(permute(np.arange(len(value)), count))]
        state[name] = torch.from_numpy(np.array(value))
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


@pytest.mark.slow
def test_logits_equal_transformers(smollm2_gguf, reference):
    program = load_program(smollm2_gguf, dtype=torch.float32)
    assert relative_error(program, reference, vocab=49000) < 1e-4


@pytest.mark.slow
def test_weights_equal_the_gguf_loading_of_transformers(smollm2_gguf, source):
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate only")
    model = LlamaForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32)
    for name in source.checkpoint.names():
        assert torch.equal(source.checkpoint.weight(name).load(), model.get_parameter(name)), name
