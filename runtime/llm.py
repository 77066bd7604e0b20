"""`LLM`: an engine in this process, called from one thread.

>>> with LLM("engine/") as llm:
...     [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
...     print(answer.outputs[0].text)
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmbuild.errors import LLMBuildError, RequestError
from llmbuild.runtime.admission import Admission, Message, Prompt
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executor import Executor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.loading import LoadedEngine, load_engine
from llmbuild.runtime.outputs import RequestOutput
from llmbuild.runtime.request import Request
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.runtime.tokenizer import Tokenizer


class LLM:
    """Loads an engine directory. Close it, or use it in a `with` statement, to free the device.

    Args:
        path: Engine directory.
        num_threads: Threads of the cpu target; None lets it choose.
        kv_cache_blocks: Blocks of the KV pool; None sizes it from the engine's limits.
        kv_memory_fraction: How much of the GPU memory that is left may hold KV blocks (cuda, tensorrt); None: 0.9.
        device: Number of the GPU; None: 0. Not with the cpu target.

    Raises:
        ConfigError: An option is out of range, or the engine's target does not have it.
        EngineError: The engine is damaged, of another version, or not for this machine.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_threads: int | None = None,
        kv_cache_blocks: int | None = None,
        kv_memory_fraction: float | None = None,
        device: int | None = None,
    ) -> None:
        self._set_up(
            load_engine(
                path,
                num_threads=num_threads,
                kv_cache_blocks=kv_cache_blocks,
                kv_memory_fraction=kv_memory_fraction,
                device=device,
            )
        )

    @classmethod
    def over(cls, executor: Executor, limits: ServingLimits, tokenizer: Tokenizer | None = None) -> LLM:
        """Return an LLM over an executor that is loaded already."""
        llm = cls.__new__(cls)
        llm._set_up(LoadedEngine(executor, limits, tokenizer))
        return llm

    def _set_up(self, loaded: LoadedEngine) -> None:
        self.limits = loaded.limits
        self._admission = Admission(loaded.executor, loaded.limits, loaded.tokenizer)
        self._core: EngineCore | None = EngineCore(*loaded)
        self._ids = itertools.count()
        # Outputs of the requests in progress, until their caller takes them: streams may be read in turns.
        self._inbox: dict[str, deque[RequestOutput]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises: RequestError: The engine has none."""
        return self._admission.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What a call without parameters uses."""
        return self._admission.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts together, in-flight batched. All are checked before any is run.

        Args:
            prompts: A text, a list of token ids, or a list of either.
            params: For all prompts, or a list with one for each; None uses the model's defaults.

        Returns:
            One finished output per prompt, in the order of the prompts.

        Raises:
            RequestError: A prompt or its parameters are invalid or beyond the engine's limits.
        """
        listed: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        return self._run([self._request(p, q) for p, q in zip(listed, _params_for(listed, params), strict=True)])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations.

        Args:
            messages: Each with "role" and "content".
            template_variables: What the chat template knows besides, such as tools or add_generation_prompt.

        Raises:
            RequestError: As `generate`; also when the model has no chat template, or it refuses the messages.
        """
        several = bool(messages) and all(isinstance(entry, (list, tuple)) for entry in messages)
        conversations: Any = messages if several else [messages]
        prompts = [self._admission.chat_prompt(conversation, **template_variables) for conversation in conversations]
        return self.generate(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding an output at each step; the last one is `finished`.

        Outputs are cumulative, as vLLM's: `outputs[i].text` and `token_ids` hold the completion so far, and
        `new_text` and `new_token_ids` what came since the output before. A step may bring a token and no text, when a
        character or a possible stop string is incomplete. Leaving the loop early ends the request.

        Raises:
            RequestError: At once, not at the first output.
        """
        request = self._request(prompt, params, stream=True)
        return self._stream(request)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template_variables: Any
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, yielding as `stream` does."""
        return self.stream(self._admission.chat_prompt(messages, **template_variables), params)

    def close(self) -> None:
        """Free the engine. Twice is once."""
        if self._core is not None:
            self._core.close()
            self._core = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams | None, *, stream: bool = False) -> Request:
        return self._admission.request(str(next(self._ids)), prompt, params, stream=stream)

    def _run(self, requests: list[Request]) -> list[RequestOutput]:
        self._add(requests)
        try:
            return [self._next_output(request) for request in requests]
        finally:
            self._drop(requests)

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        self._add([request])
        try:
            finished = False
            while not finished:
                output = self._next_output(request)
                finished = output.finished
                yield output
        finally:
            self._drop([request])

    def _add(self, requests: list[Request]) -> None:
        core = self._open_core()
        for request in requests:
            self._inbox[request.request_id] = deque()
            core.add(request)

    def _next_output(self, request: Request) -> RequestOutput:
        core, inbox = self._open_core(), self._inbox[request.request_id]
        while not inbox:
            for output in core.step():
                self._inbox[output.request_id].append(output)
        return inbox.popleft()

    def _drop(self, requests: list[Request]) -> None:
        """Forget requests, and end those still running (an exception, or a stream left early)."""
        for request in requests:
            if self._core is not None:
                self._core.abort(request.request_id)
            self._inbox.pop(request.request_id, None)

    def _open_core(self) -> EngineCore:
        if self._core is None:
            raise LLMBuildError("this LLM is closed")
        return self._core


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__") or isinstance(prompts, Mapping):
        raise RequestError(
            f"prompts is {type(prompts).__name__}", hint="give a text, a list of token ids, or a list of either"
        )
    if len(prompts) == 0:
        return False
    try:
        operator.index(prompts[0])
    except TypeError:
        return False
    return True


def _params_for(
    prompts: list[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, (list, tuple)):
        raise RequestError(f"params is {type(params).__name__}", hint="give a SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(prompts)} prompts, but {len(params)} params", hint="give one for all, or one for each prompt"
        )
    return params
