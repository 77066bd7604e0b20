"""Requests and sequences for tests of single parts."""

from __future__ import annotations

from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.request import Request, make_request
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.runtime.sequence import Sequence

LIMITS = ServingLimits(max_batch_size=4, max_num_tokens=16, max_seq_len=64, vocab_size=32, eos_token_ids=(2,))


def request_of(prompt_len: int, *, pool_tokens: int = 1000, limits: ServingLimits = LIMITS, **params) -> Request:
    prompt = [(7 * i + 3) % limits.vocab_size for i in range(prompt_len)]
    return make_request("r", prompt, SamplingParams(**params), limits, pool_tokens=pool_tokens)


def sequence_of(prompt_len: int, **params) -> Sequence:
    return Sequence(request_of(prompt_len, **params), 0)
