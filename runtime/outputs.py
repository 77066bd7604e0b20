"""What a caller gets: `RequestOutput` for a prompt, with one `CompletionOutput` for each of its n completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """logprob: natural logarithm. rank: 1 for the likeliest token. decoded_token: its text, None without tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One completion, from its beginning up to now.

    text and token_ids are cumulative; new_text and new_token_ids are what came since the last output of a stream (all
    of it, outside streams). token_ids holds the token that ended the completion, text does not show it.
    logprobs: per token, id -> Logprob of the likeliest tokens and the sampled one; None when not asked for.
    finish_reason: None while running; "stop" (end of sequence, stop token or string), "length" or "abort".
    stop_reason: the stop string or stop token id that ended it; None for the model's own end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    new_text: str
    new_token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds since the request arrived; None while it has not happened. preemptions: over all completions."""

    first_token_s: float | None = None
    finished_s: float | None = None
    preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """prompt: the text, when the prompt was given as text. finished: all completions are."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
