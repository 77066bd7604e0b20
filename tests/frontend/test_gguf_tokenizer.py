"""Tokenizers built from GGUF metadata: cutting rules, special tokens, framing; and parity with transformers."""

from __future__ import annotations

import json

import gguf
import pytest
from tokenizers import Tokenizer

from llmbuild.builder.frontend.gguf_file import GGUFFile
from llmbuild.builder.frontend.gguf_tokenizer import gguf_tokenizer, gguf_tokenizer_files
from llmbuild.errors import ModelError, UnsupportedError
from support import texts
from support.tiny_gguf import write_byte_tokenizer
from support.tiny_models import BOS, BOS_TOKEN, CHAT_TEMPLATE, EOS, EOS_TOKEN, byte_level_tokenizer

TEXTS = [*texts.TEXTS, "<|begin|>user\nhi<|end|>\n"]


def saved(tmp_path, pre="gpt-2", edit=None):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    write_byte_tokenizer(writer, pre)
    if edit:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(tmp_path / "t.gguf")


def pieces(tokenizer, text):
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(pre, text, tmp_path):
    tokenizer = gguf_tokenizer(saved(tmp_path, pre))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_rules_equal_the_tokenizer_that_was_stored(text, tmp_path):
    assert gguf_tokenizer(saved(tmp_path)).encode(text).ids == byte_level_tokenizer().encode(text).ids


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a1234 b", ["a", "1234", "Ġb"]),
        ("smollm", "a1234 b", ["a", "1", "2", "3", "4", "Ġb"]),
        ("llama-bpe", "a12345 b", ["a", "123", "45", "Ġb"]),
        ("qwen2", "a1234 b", ["a", "1", "2", "3", "4", "Ġb"]),
        ("gpt-2", "IT'S it's", ["IT", "'", "S", "Ġit", "'s"]),
        ("llama-bpe", "IT'S it's", ["IT", "'S", "Ġit", "'s"]),
        ("qwen2", "x(y)\n\n  z", ["x", "(y", ")ĊĊ", "Ġ", "Ġz"]),
    ],
)
def test_cutting_rules(pre, text, expected, tmp_path):
    assert pieces(gguf_tokenizer(saved(tmp_path, pre)), text) == expected


def test_composed_characters_are_normalised_for_qwen2_only(tmp_path):
    assert gguf_tokenizer(saved(tmp_path, "qwen2")).encode("e\u0301").ids == byte_level_tokenizer().encode("é").ids
    assert gguf_tokenizer(saved(tmp_path, "gpt-2")).encode("e\u0301").ids != byte_level_tokenizer().encode("é").ids


def test_control_tokens_are_special_and_one_id(tmp_path):
    tokenizer = gguf_tokenizer(saved(tmp_path))
    ids = tokenizer.encode("a<|end|>").ids
    assert ids == [*byte_level_tokenizer().encode("a").ids, EOS]
    assert tokenizer.decode(ids) == "a"


def test_beginning_token_is_put_first_only_where_it_should(tmp_path):
    def first(pre, value=None):
        edit = None if value is None else lambda writer: writer.add_add_bos_token(value)
        tokenizer = gguf_tokenizer(saved(tmp_path, pre, edit))
        assert tokenizer.encode("a", add_special_tokens=False).ids[0] != BOS
        return tokenizer.encode("a").ids[0] == BOS

    assert not first("gpt-2") and not first("smollm") and not first("qwen2")
    assert first("llama-bpe") and first("gpt-2", True) and not first("llama-bpe", False)


def test_end_token_is_appended_when_asked(tmp_path):
    tokenizer = gguf_tokenizer(saved(tmp_path, edit=lambda writer: writer.add_add_eos_token(True)))
    assert tokenizer.encode("a").ids[-1] == EOS


def test_files(tmp_path):
    files = gguf_tokenizer_files(saved(tmp_path))
    assert Tokenizer.from_str(files["tokenizer.json"].decode()).get_vocab_size() == 288
    assert files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    specials = json.loads(files["tokenizer_config.json"])
    assert (specials["bos_token"], specials["eos_token"]) == (BOS_TOKEN, EOS_TOKEN)


def test_unknown_pre_tokenizer_is_named_with_the_nearest(tmp_path):
    with pytest.raises(UnsupportedError, match="GGUF pre-tokenizer 'qwen3' is not supported") as caught:
        gguf_tokenizer(saved(tmp_path, "qwen3"))
    assert "did you mean 'qwen2'?" in str(caught.value)


def test_other_tokenizer_models_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="GGUF tokenizer model 'llama' is not supported"):
        gguf_tokenizer(GGUFFile(tmp_path / "t.gguf"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda writer: writer.kv_data[0].pop("tokenizer.ggml.merges"), r"lacks tokenizer\.ggml\.merges"),
        (lambda writer: writer.kv_data[0].pop("tokenizer.ggml.token_type"), r"lacks tokenizer\.ggml\.token_type"),
    ],
)
def test_missing_metadata_is_named(edit, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        gguf_tokenizer(saved(tmp_path, edit=edit))


def test_special_token_outside_the_vocabulary(tmp_path):
    def edit(writer):
        writer.kv_data[0].pop("tokenizer.ggml.eos_token_id")
        writer.add_eos_token_id(5000)

    with pytest.raises(ModelError, match="special token id 5000 is outside the 288 tokens"):
        gguf_tokenizer_files(saved(tmp_path, edit=edit))
