"""GGUF tokenizer metadata → a `tokenizers.Tokenizer`, for byte-level BPE with a known pre-tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmbuild.builder.frontend.gguf_file import GGUFFile
from llmbuild.builder.frontend.hf_tokenizer import describe
from llmbuild.errors import ModelError, UnsupportedError, nearest

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merges apply.

    Attributes:
        digits: Every digit stands alone, before GPT-2's own pattern applies.
        pattern: Replaces GPT-2's pattern, or None.
        nfc: Text is normalised to NFC first.
        whole_words: A word that is a token is taken as it is, whatever the merges say.
        adds_bos: Whether a beginning token is put first unless the file says otherwise.
    """

    digits: bool = False
    pattern: str | None = None
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = PreTokenizer(
    pattern=rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}", whole_words=True, adds_bos=True
)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(pattern=rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_PUNCTUATION_AND_SPACE}", nfc=True),
}


def gguf_tokenizer_files(gguf: GGUFFile) -> dict[str, bytes]:
    """Return the files of the engine's `tokenizer/` folder.

    Raises:
        UnsupportedError: the tokenizer is not byte-level BPE, or its pre-tokenizer is not known.
        ModelError: the metadata contradict themselves.
    """
    tokens = gguf.require("tokenizer.ggml.tokens")
    specials = {
        f"{short}_token": _token(tokens, gguf.get(f"tokenizer.ggml.{key}_token_id"))
        for short, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return describe(gguf_tokenizer(gguf), specials, gguf.get("tokenizer.chat_template"))


def gguf_tokenizer(gguf: GGUFFile) -> Any:
    """Return the `tokenizers.Tokenizer` that the metadata describe. Raises as `gguf_tokenizer_files`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    model = gguf.require("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedError(
            f"GGUF tokenizer model {model!r} is not supported",
            where="tokenizer.ggml.model",
            hint="known: gpt2 (byte-level BPE); convert the Hugging Face checkpoint of this model instead",
        )
    name = gguf.get("tokenizer.ggml.pre", "(none)")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"GGUF pre-tokenizer {name!r} is not supported",
            where="tokenizer.ggml.pre",
            hint=nearest(name, list(PRE_TOKENIZERS)),
        )
    pre = PRE_TOKENIZERS[name]
    tokens, types = gguf.require("tokenizer.ggml.tokens"), gguf.require("tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens holds a token twice or lacks types", where=str(gguf.path))
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.require("tokenizer.ggml.merges")]

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cutter(pre, bool(gguf.get("tokenizer.ggml.add_space_prefix", False)))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _framer(gguf, pre, tokens)
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    written = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in written])
    return tokenizer


def _cutter(pre: PreTokenizer, space_prefix: bool) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pre.pattern is not None:
        split = pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=space_prefix, use_regex=False)
        return pre_tokenizers.Sequence([split, to_bytes])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=space_prefix)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]) if pre.digits else gpt2


def _framer(gguf: GGUFFile, pre: PreTokenizer, tokens: list[str]) -> Any:
    """The post-processor: beginning and end tokens around every text, as the file says."""
    from tokenizers import processors

    pieces, used = ["$A"], []
    for key, at, default in (("bos", 0, pre.adds_bos), ("eos", 2, False)):
        index = gguf.get(f"tokenizer.ggml.{key}_token_id")
        if gguf.get(f"tokenizer.ggml.add_{key}_token", default):
            token = _token(tokens, index)
            if token is None:
                raise ModelError(
                    f"tokenizer.ggml.add_{key}_token is set, but there is no {key} token", where=str(gguf.path)
                )
            pieces.insert(at, token)
            used.append((token, index))
    plain = processors.ByteLevel(trim_offsets=True)
    if not used:
        return plain
    second = ["$B:1" if piece == "$A" else f"{piece}:1" for piece in pieces]
    template = processors.TemplateProcessing(single=pieces, pair=pieces + second, special_tokens=used)
    return processors.Sequence([plain, template])


def _token(tokens: list[str], index: int | None) -> str | None:
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelError(f"special token id {index} is outside the {len(tokens)} tokens of the tokenizer")
    return tokens[index]
