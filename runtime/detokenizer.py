"""Incremental detokenizer: token ids in, text out, never half a character."""

from __future__ import annotations

import codecs

from llmbuild.runtime.token_bytes import TokenBytes

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the tokens of one completion into text, as a continuation of its prompt.

    A character whose bytes come in several tokens is held until it is whole. Bytes that can no longer become a
    character give U+FFFD at once, those still incomplete at the end give it in `flush`: the pieces put together are
    the decoding of all bytes together. Constant time a token.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._bytes = token_bytes
        self._skip_special = skip_special_tokens
        self._decoder = _utf8("replace")

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, "" when a character is still incomplete."""
        return self._decoder.decode(self._bytes.of(token_id, skip_special=self._skip_special))

    def flush(self) -> str:
        """Return what is left at the end: "" unless the completion ends inside a character."""
        return self._decoder.decode(b"", final=True)
