"""Tokenizers made in a millisecond: one token a byte, trained byte-level BPE, and `▁` with byte fallback."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from llmbuild.runtime.token_bytes import byte_alphabet

BOS, EOS, IM_END = 256, 257, 258
BYTE_VOCAB_SIZE = 260
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
TEXT = "the cat sat on the mat, naïve façade; 漢字かな交じり文 и кириллица 👩‍👩‍👧‍👦 🎉🎉 ½ the end of the text"


@cache
def byte_definition() -> str:
    """tokenizer.json with id = byte, then <s>, </s>, <|im_end|> and <tool call>."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    return _byte_level(tokenizer).to_str()


@cache
def bpe_definition() -> str:
    """tokenizer.json with tokens of one or several bytes that split characters anywhere."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return _byte_level(tokenizer).to_str()


@cache
def byte_fallback_definition() -> str:
    """tokenizer.json as Llama 2's: `▁` for spaces, <0xNN> for what the vocabulary lacks, first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz,é漢"]
    pieces += ["▁t", "▁th", "▁the", "at"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "t")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str()


def _byte_level(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])  # not special, and with a space in it
    return tokenizer
