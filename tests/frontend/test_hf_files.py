"""Small files of a Hugging Face directory: tokenizer, chat template, generation config."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from llmbuild.builder.frontend.hf_model import load_generation_config, special_ids
from llmbuild.builder.frontend.hf_tokenizer import tokenizer_files
from llmbuild.errors import ModelError
from support.tiny_models import BOS, BOS_TOKEN, CHAT_TEMPLATE, EOS, EOS_TOKEN, PAD, tiny_config, write_tokenizer

TEXTS = [
    "the cat and the thing",
    "  two  spaces\n\n\ttab",
    "naïve café 日本語 😀 👩\u200d👩\u200d👧",
    "x = {'a': [1, 22, 333]}  # π",
    "",
]


@pytest.fixture
def directory(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def test_end_tokens_come_from_the_generation_config_first():
    config = tiny_config("llama")
    assert special_ids(config, {}) == (BOS, (EOS,), PAD)
    assert special_ids(config, {"eos_token_id": [EOS, 7], "bos_token_id": 3}) == (3, (EOS, 7), PAD)
    config.eos_token_id = [5, 6]
    assert special_ids(config, {"eos_token_id": None}).eos == (5, 6)
    config.eos_token_id = config.bos_token_id = None
    assert special_ids(config, {})[:2] == (None, ())
    assert special_ids(config, {"eos_token_id": 0}).eos == (0,)


def test_tokenizer_gives_the_ids_of_transformers(directory):
    files = tokenizer_files(directory)
    ours, theirs = Tokenizer.from_str(files["tokenizer.json"].decode()), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == text


def test_special_tokens_and_template_are_carried(directory):
    files = tokenizer_files(directory)
    assert files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    specials = json.loads(files["tokenizer_config.json"])
    assert (specials["bos_token"], specials["eos_token"]) == (BOS_TOKEN, EOS_TOKEN)
    assert "generation_config.json" not in files


def test_template_file_is_used(directory):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert "chat_template.jinja" not in tokenizer_files(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_files(directory)["chat_template.jinja"] == b"{{ messages }}"


def test_stored_padding_and_truncation_are_dropped(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    ours = Tokenizer.from_str(tokenizer_files(directory)["tokenizer.json"].decode())
    assert len(ours.encode("0123456789").ids) == 10


def test_generation_config_is_carried_as_it_is(directory):
    text = '{"eos_token_id": [256, 7],\n "temperature": 0.6}'
    (directory / "generation_config.json").write_text(text)
    assert tokenizer_files(directory)["generation_config.json"] == text.encode()
    assert load_generation_config(directory)["eos_token_id"] == [256, 7]


def test_no_tokenizer_at_all_gives_no_files(tmp_path):
    assert tokenizer_files(tmp_path) == {}
    assert load_generation_config(tmp_path) == {}


def test_unreadable_tokenizer_is_named(directory):
    (directory / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    with pytest.raises(ModelError, match="the tokenizer cannot be read") as caught:
        tokenizer_files(directory)
    assert caught.value.where == str(directory) and "save it once with transformers" in str(caught.value)


def test_unreadable_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON"):
        load_generation_config(tmp_path)
