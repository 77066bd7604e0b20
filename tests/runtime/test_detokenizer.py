from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.errors import UnsupportedError
from llmbuild.runtime.token_bytes import TokenBytes, byte_alphabet
from llmbuild.runtime.tokenizer import Tokenizer
from support.tiny_tokenizers import BYTE_VOCAB_SIZE, EOS, bpe_definition, byte_definition, byte_fallback_definition

TRICKY = st.text(st.sampled_from("ab é漢👩‍👧🎉\u200d\ufe0f½\n\x00\U0010ffff▁"), max_size=12) | st.text(max_size=12)
DEFINITIONS = {"byte": byte_definition, "bpe": bpe_definition, "fallback": byte_fallback_definition}


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(TRICKY, st.sampled_from(["byte", "bpe"]))
def test_pieces_make_the_text_and_never_hold_half_a_character(text: str, name: str) -> None:
    tokenizer = Tokenizer(DEFINITIONS[name]())
    pieces = deltas(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTE_VOCAB_SIZE + 2), max_size=24), st.sampled_from(["byte", "bpe"]), st.booleans())
def test_any_tokens_equal_the_decoding_by_tokenizers(ids: list[int], name: str, skip: bool) -> None:
    """Random ids: broken bytes, special tokens, ids past the vocabulary of the byte tokenizer."""
    definition = DEFINITIONS[name]()
    full = tokenizers.Tokenizer.from_str(definition).decode(ids, skip_special_tokens=skip)
    tokenizer = Tokenizer(definition)
    assert "".join(deltas(tokenizer, ids, skip_special_tokens=skip)) == full
    assert tokenizer.decode(ids, skip_special_tokens=skip) == full


@settings(max_examples=200, deadline=None)
@given(TRICKY)
def test_byte_fallback_continues_a_text(text: str) -> None:
    """Behind a prompt, tokens decode to what they add to it; the space before the first word stays."""
    definition = byte_fallback_definition()
    library, tokenizer = tokenizers.Tokenizer.from_str(definition), Tokenizer(definition)
    prompt, ids = library.encode("the").ids, library.encode(text.replace("▁", "_")).ids
    added = library.decode(prompt + ids)[len(library.decode(prompt)) :]
    assert "".join(deltas(tokenizer, ids)) == added


def test_an_emoji_comes_whole() -> None:
    tokenizer = Tokenizer(byte_definition())
    assert deltas(tokenizer, [*"a🎉b".encode()]) == ["a", "", "", "", "🎉", "b", ""]


def test_broken_bytes_show_as_soon_as_they_are_certain() -> None:
    tokenizer = Tokenizer(byte_definition())
    assert deltas(tokenizer, [0xF0, 0x9F, ord("x"), 0xFF, 0xE6]) == ["", "", "\ufffdx", "\ufffd", "", "\ufffd"]


def test_special_tokens() -> None:
    tokenizer = Tokenizer(byte_definition())
    assert deltas(tokenizer, [104, EOS, 105]) == ["h", "", "i", ""]
    assert deltas(tokenizer, [104, EOS, 105], skip_special_tokens=False) == ["h", "</s>", "i", ""]
    assert deltas(tokenizer, [259]) == ["<tool call>", ""]


def test_the_alphabet_is_the_library_s() -> None:
    assert sorted(byte_alphabet()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_a_decoder_that_looks_at_neighbours_is_refused_by_name() -> None:
    library = tokenizers.Tokenizer.from_str(byte_definition())
    library.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="has a step 'WordPiece' that cannot be applied token by token"):
        TokenBytes(library, json.loads(library.to_str())["decoder"])
    with pytest.raises(UnsupportedError, match="'Replace'"):
        TokenBytes(library, {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"})


def test_a_broken_byte_spares_the_characters_around_it() -> None:
    library, tokenizer = (make(byte_fallback_definition()) for make in (tokenizers.Tokenizer.from_str, Tokenizer))
    run = [library.token_to_id(f"<0x{byte:02X}>") for byte in (*"½".encode(), 0xFF, *"é".encode())]
    assert deltas(tokenizer, run) == ["", "½", "\ufffd", "", "é", ""]
