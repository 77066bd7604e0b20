"""`SamplingParams`: how one request is sampled and when it stops. Names and meanings are those of vLLM.

A field that is accepted works. Options that vLLM has and this runtime lacks are no fields, so that a typo or an
unsupported option is a TypeError instead of silence.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmbuild.errors import RequestError

MAX_LOGPROBS = 20
SEED_RANGE = (-(2**63), 2**64 - 1)


@dataclass(frozen=True)
class SamplingParams:
    """Immutable, checked at construction.

    Args:
        n: Completions per prompt, sampled independently. More than 1 needs temperature > 0.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: Sample among the k most likely tokens; 0 or -1 means all.
        top_p: Sample among the fewest tokens whose probability reaches top_p, in (0, 1].
        min_p: Drop tokens less likely than min_p times the likeliest one, in [0, 1].
        seed: Same seed, prompt and parameters give the same tokens, whatever else runs; None draws a fresh seed.
        presence_penalty: Subtracted from the logit of each token generated so far, in [-2, 2].
        frequency_penalty: The same, times how often the token was generated, in [-2, 2].
        repetition_penalty: Divides (positive) or multiplies (negative) the logits of tokens seen in the prompt or
            generated; > 0, 1 is off.
        logit_bias: Token id -> value added to its logit, in [-100, 100].
        allowed_token_ids: When given, only these tokens can be sampled.
        stop: String or strings that end the completion. The text ends before the match.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, in the text.
        stop_token_ids: Token ids that end the completion, besides the model's end-of-sequence ids.
        ignore_eos: Do not end at the model's end-of-sequence ids.
        max_tokens: Longest completion in tokens. None (the default; vLLM's is 16) means up to the engine's limit;
            a number that does not fit beside the prompt is refused rather than cut.
        min_tokens: Stop tokens cannot be sampled, and stop strings are not looked for, before this many tokens.
        logprobs: Return the log-probabilities of that many likeliest tokens and of the sampled one, at most 20.
            They are the model's own, before penalties and temperature. None returns none.
        skip_special_tokens: Leave tokens such as <|im_end|> out of the text.

    Raises:
        RequestError: A value is outside its range, or two contradict each other.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1))
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        self._set("top_k", max(_integer("top_k", self.top_k, -1, meaning="0 or -1 for all, or at least 1"), 0))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, *SEED_RANGE, meaning="None or a 64-bit integer"))
        self._set("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        penalty = _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        self._set("repetition_penalty", penalty)
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _boolean(name, getattr(self, name))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, meaning="None or at least 1"))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.logprobs is not None:
            self._set("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}",
                hint="min_tokens must be at most max_tokens",
            )
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n is {self.n}, but temperature 0 gives the same completion every time",
                hint="set n to 1, or temperature above 0",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty: no token could be sampled", hint="list at least one id, or pass None"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _wrong(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is {value!r}", where=f"SamplingParams.{name}", hint=f"allowed: {allowed}")


def _integer(name: str, value: Any, low: int, high: int | None = None, *, meaning: str | None = None) -> int:
    allowed = meaning or (f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}")
    if isinstance(value, bool):
        raise _wrong(name, value, allowed)
    try:
        number = operator.index(value)
    except TypeError:
        raise _wrong(name, value, allowed) from None
    if number < low or (high is not None and number > high):
        raise _wrong(name, value, allowed)
    return number


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    upper = f"{high:g}]" if math.isfinite(high) else "inf)"
    allowed = f"a number in {'(' if open_low else '['}{low:g}, {upper}"
    if isinstance(value, (bool, str)) or value is None:
        raise _wrong(name, value, allowed)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _wrong(name, value, allowed) from None
    # NaN fails every comparison, so the test is written for what is allowed.
    if not (low <= number <= high and math.isfinite(number)) or (open_low and number == low):
        raise _wrong(name, value, allowed)
    return number


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")


def _strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    allowed = "a string that is not empty, or a list of such"
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise _wrong("stop", value, allowed)
    if not all(strings):
        raise _wrong("stop", value, allowed)
    return tuple(strings)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise _wrong(name, value, "a list of token ids")
    return tuple(_integer(name, token, 0, meaning="a list of token ids, each at least 0") for token in value)


def _bias(value: Any) -> dict[int, float] | None:
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", value, "a mapping of token id to a number in [-100, 100]")
    return {_integer("logit_bias", k, 0): _number("logit_bias", v, -100.0, 100.0) for k, v in value.items()}
