"""`Admission`: prompts as people give them ⇒ checked requests. Used by LLM and AsyncLLM; threads may share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from llmbuild.errors import LLMBuildError, RequestError
from llmbuild.runtime.executor import Executor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.request import Request, make_request
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_FROM_GENERATION_CONFIG = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Admission:
    """default_params: what a request without parameters gets, the model's generation_config.json over the defaults."""

    def __init__(self, executor: Executor, limits: ServingLimits, tokenizer: Tokenizer | None) -> None:
        self._pool_tokens = executor.num_blocks * executor.block_size
        self._limits = limits
        self._tokenizer = tokenizer
        self.default_params = _default_params(tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises: RequestError: The engine has none."""
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer", hint="give prompts as lists of token ids")
        return self._tokenizer

    def request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, *, stream: bool = False
    ) -> Request:
        """Tokenize and check one prompt.

        Raises:
            RequestError: See `make_request`; also text or stop strings without a tokenizer.
        """
        if params is None:
            params = self.default_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {type(params).__name__}", hint="give a SamplingParams")
        text = prompt if isinstance(prompt, str) else None
        if text is not None:
            if not text:
                raise RequestError("the prompt is empty", where=f"request {request_id}", hint="give some text")
            token_ids: Sequence[int] = self.tokenizer.encode(text)
        else:
            token_ids = cast("Sequence[int]", prompt)
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none", hint="use stop_token_ids")
        return make_request(
            request_id,
            token_ids,
            params,
            self._limits,
            pool_tokens=self._pool_tokens,
            prompt=text,
            stream=stream,
        )

    def chat_prompt(self, messages: Sequence[Message], **template_variables: Any) -> list[int]:
        """Return the token ids of a conversation.

        Raises:
            RequestError: No chat template, or it refuses the messages.
        """
        return self.tokenizer.encode_chat(messages, **template_variables)


def _default_params(tokenizer: Tokenizer | None) -> SamplingParams:
    config = tokenizer.generation_config if tokenizer is not None else {}
    given = {name: config[name] for name in _FROM_GENERATION_CONFIG if config.get(name) is not None}
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise LLMBuildError(
            f"generation_config.json holds a bad default: {error.what}", where="tokenizer/generation_config.json"
        ) from error
