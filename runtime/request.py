"""`Request`: an admitted prompt with its parameters, checked against the engine before anything is scheduled."""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from llmbuild.errors import RequestError
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """prompt_token_ids: int32 [prompt_len]. max_tokens: resolved, never None. seed: given or drawn, 64 bits.

    stop_ids: every token id that ends this request; eos_ids: those of them that are the model's own.
    stream: whether its consumer wants an output at each step. arrival: seconds of `time.monotonic`.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_ids: frozenset[int]
    eos_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    stream: bool = False
    arrival: float = field(default_factory=time.monotonic)

    @cached_property
    def has_extras(self) -> bool:
        """Whether a row of this request needs more than the arrays of a SamplingBatch at every step."""
        params = self.params
        asked = (params.logit_bias, params.allowed_token_ids, params.logprobs)
        return params.has_penalties or any(value is not None for value in asked)

    @cached_property
    def stop_array(self) -> np.ndarray | None:
        """int64 ids banned until min_tokens; None when nothing stops the request."""
        return np.array(sorted(self.stop_ids), np.int64) if self.stop_ids else None

    @cached_property
    def allowed_array(self) -> np.ndarray | None:
        allowed = self.params.allowed_token_ids
        return None if allowed is None else np.array(sorted(set(allowed)), np.int64)

    @cached_property
    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        bias = self.params.logit_bias
        return None if bias is None else (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))


def make_request(
    request_id: str,
    prompt_token_ids: Iterable[int],
    params: SamplingParams,
    limits: ServingLimits,
    *,
    pool_tokens: int,
    prompt: str | None = None,
    stream: bool = False,
) -> Request:
    """Check a request against the engine's limits.

    Args:
        pool_tokens: Tokens that the whole KV pool holds.
        prompt: The text, when the prompt was given as text.

    Raises:
        RequestError: Empty prompt, id outside the vocabulary, or more tokens than the engine or its pool can hold.
    """
    where = f"request {request_id}"
    ids = _prompt_array(prompt_token_ids, limits.vocab_size, where)
    sampled = limits.vocab_size if limits.num_tokens is None else limits.num_tokens
    for name, listed in _ids_of_params(params):
        for token in listed:
            if token >= sampled:
                raise RequestError(
                    f"{name} holds {token}, but the vocabulary has {sampled} tokens",
                    where=where,
                    hint=f"ids go from 0 to {sampled - 1}",
                )
    eos_ids = frozenset(() if params.ignore_eos else limits.eos_token_ids)
    stop_ids = eos_ids.union(params.stop_token_ids or ())
    if params.allowed_token_ids is not None and params.min_tokens > 0 and stop_ids.issuperset(params.allowed_token_ids):
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but every id of allowed_token_ids ends the completion",
            where=where,
            hint="allow a token that is no stop token, or set min_tokens to 0",
        )
    seed = secrets.randbits(64) if params.seed is None else params.seed & (2**64 - 1)
    max_tokens = _resolve_max_tokens(len(ids), params, limits, pool_tokens, where)
    return Request(request_id, ids, params, max_tokens, seed, stop_ids, eos_ids, prompt, stream)


def _prompt_array(prompt: Iterable[int], vocab_size: int, where: str) -> np.ndarray:
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError("a prompt of token ids must be a list of integers", where=where) from None
    if not ids:
        raise RequestError("the prompt is empty", where=where, hint="give at least one token")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"the prompt holds the token id {token}, but the vocabulary has {vocab_size} tokens",
                where=where,
                hint=f"ids go from 0 to {vocab_size - 1}",
            )
    return np.array(ids, np.int32)


def _ids_of_params(params: SamplingParams) -> Iterable[tuple[str, Iterable[int]]]:
    yield "stop_token_ids", params.stop_token_ids or ()
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "logit_bias", params.logit_bias or ()


def _resolve_max_tokens(
    prompt_len: int, params: SamplingParams, limits: ServingLimits, pool_tokens: int, where: str
) -> int:
    """Return how many tokens may be generated; the last one is sampled and never cached."""
    if prompt_len >= limits.max_seq_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, but the engine holds {limits.max_seq_len}, output included",
            where=where,
            hint="shorten the prompt, or convert with a larger --max-seq-len",
        )
    if prompt_len > pool_tokens:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, but the KV cache holds {pool_tokens}",
            where=where,
            hint="shorten the prompt, or load with more KV cache blocks",
        )
    by_length, by_pool = limits.max_seq_len - prompt_len, pool_tokens - prompt_len + 1
    asked = min(by_length, by_pool) if params.max_tokens is None else params.max_tokens
    if asked > by_length:
        raise RequestError(
            f"{prompt_len} prompt tokens and max_tokens {asked} make {prompt_len + asked}, "
            f"but the engine holds sequences of {limits.max_seq_len}",
            where=where,
            hint=f"max_tokens can be at most {by_length} here; leave it out to use what is left",
        )
    if asked > by_pool:
        raise RequestError(
            f"{prompt_len} prompt tokens and max_tokens {asked} can never fit the KV cache of {pool_tokens} tokens",
            where=where,
            hint=f"max_tokens can be at most {by_pool} here, or load with more KV cache blocks",
        )
    if asked < params.min_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but only {asked} tokens fit after the prompt of {prompt_len}",
            where=where,
            hint=f"min_tokens can be at most {asked} here",
        )
    return asked
