"""`Tokenizer`: text and chats to token ids, from the `tokenizer/` folder of an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from llmbuild.errors import EngineError, RequestError
from llmbuild.runtime.chat_template import ChatTemplate
from llmbuild.runtime.detokenizer import Detokenizer
from llmbuild.runtime.token_bytes import TokenBytes


class Tokenizer:
    """Threads may share it.

    Args:
        definition: The text of tokenizer.json.
        config: tokenizer_config.json: special tokens such as bos_token and eos_token.
        chat_template: Jinja text, if the model has one.
        generation_config: generation_config.json.

    Raises:
        EngineError: The definition cannot be read.
        UnsupportedError: Its decoder does not work token by token.
    """

    def __init__(
        self,
        definition: str,
        *,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises nothing narrower
            raise EngineError(f"the tokenizer cannot be read: {error}", where="tokenizer/tokenizer.json") from error
        # A training-time cut or padding stored in the file would silently change prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bytes = TokenBytes(self._tokenizer, json.loads(definition).get("decoder"))
        self._config = dict(config or {})
        self._chat_source = chat_template
        self.generation_config: dict[str, Any] = dict(generation_config or {})

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        """Read an engine's `tokenizer/` folder; only tokenizer.json must be there."""
        definition = directory / "tokenizer.json"
        if not definition.is_file():
            raise EngineError("the engine has no tokenizer", where=str(definition), hint="convert the model again")
        template = directory / "chat_template.jinja"
        return Tokenizer(
            definition.read_text("utf-8"),
            config=_read_json(directory / "tokenizer_config.json"),
            chat_template=template.read_text("utf-8") if template.is_file() else None,
            generation_config=_read_json(directory / "generation_config.json"),
        )

    @property
    def num_tokens(self) -> int:
        """One more than the largest id that has a token. May be below or above the model's vocabulary."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_source is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the special tokens that the model puts around one."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Return the ids of a conversation; the template writes the special tokens itself.

        Raises:
            RequestError: The model has no chat template, or it refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the text of a conversation."""
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens inside a text: a space before the first word is kept."""
        pieces = (self._bytes.of(int(token), skip_special=skip_special_tokens) for token in token_ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return an incremental detokenizer for one completion."""
        return Detokenizer(self._bytes, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._chat_source is None:
            raise RequestError(
                "the model has no chat template",
                where="tokenizer/chat_template.jinja",
                hint="use generate() with a plain prompt, or convert a model whose tokenizer has a chat_template",
            )
        return ChatTemplate(self._chat_source, _special_tokens(self._config))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise EngineError(f"not valid JSON: {error}", where=str(path), hint="convert the model again") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return bos_token, eos_token and the like as strings (some files write them as objects with a "content")."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, Mapping) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}
