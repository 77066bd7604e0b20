"""Token id -> the bytes it stands for in running text, so that text can be built byte by byte.

The decoder of a `tokenizer.json` is a short program over token strings. Its kinds used by decoder LMs come down to a
map from each token to bytes: the byte-level alphabet of GPT-2, or `▁` for a space with `<0xNN>` for single bytes.
A decoder that is no such map is refused by name.

One difference is wanted: of a run of `<0xNN>` tokens with a broken character in it, `tokenizers` throws the whole run
away; here the characters before and after the broken one stay, because a stream has shown them already.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llmbuild.errors import UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Rule = Callable[[str | bytes], "str | bytes"]


class TokenBytes:
    """Bytes of tokens as they continue a text: the space that a decoder strips at the start of one is kept."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        """Args: decoder: the "decoder" entry of tokenizer.json.

        Raises:
            UnsupportedError: The decoder does more than map tokens to bytes.
        """
        self._tokenizer = tokenizer
        self._rules = _rules(decoder)
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the token's bytes; none for ids that only pad the vocabulary, or for special ones if skipped."""
        if skip_special and token_id in self._special:
            return b""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._compute(token_id)
        return piece

    def _compute(self, token_id: int) -> bytes:
        piece: str | bytes = self._tokenizer.id_to_token(token_id) or ""
        for rule in self._rules:
            piece = rule(piece)
        return piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass")


def _rules(decoder: dict[str, Any] | None) -> list[Rule]:
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [rule for step in steps for rule in _rule(step)]


def _rule(step: dict[str, Any]) -> list[Rule]:
    kind = step["type"]
    if kind == "ByteLevel":
        return [_from_byte_alphabet]
    if kind == "ByteFallback":
        return [_from_byte_token]
    if kind == "Metaspace":
        replacement = step.get("replacement", "▁")
        return [lambda piece: piece.replace(replacement, " ") if isinstance(piece, str) else piece]
    if kind == "Replace" and "String" in step["pattern"]:
        old, new = step["pattern"]["String"], step["content"]
        return [lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece]
    # Fuse joins the pieces, and Strip takes the space off the start of a text: neither changes a piece inside one.
    if kind == "Fuse" or (kind == "Strip" and step.get("content") == " " and step.get("stop", 0) == 0):
        return []
    raise UnsupportedError(
        f"the tokenizer's decoder has a step {kind!r} that cannot be applied token by token",
        where="tokenizer.json, decoder",
        hint="known: ByteLevel, ByteFallback, Metaspace, Replace of a string, Fuse, Strip of the first space",
    )


def _from_byte_token(piece: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(match[1], 16)]) if match else piece


def _from_byte_alphabet(piece: str | bytes) -> str | bytes:
    alphabet = byte_alphabet()
    try:
        return bytes(alphabet[char] for char in piece) if isinstance(piece, str) else piece
    except KeyError:
        return piece  # an added token holds plain text, such as a space


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet
