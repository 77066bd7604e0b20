from __future__ import annotations

import numpy as np
import pytest

from llmbuild.errors import RequestError
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampling_params import SamplingParams
from support.requests import LIMITS, request_of


def refused(prompt, *, pool_tokens: int = 1000, **params) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make_request("r7", prompt, SamplingParams(**params), LIMITS, pool_tokens=pool_tokens)
    assert caught.value.where == "request r7"
    return caught.value


def test_prompts() -> None:
    assert refused([]).what == "the prompt is empty"
    error = refused([1, 32])
    assert error.what == "the prompt holds the token id 32, but the vocabulary has 32 tokens"
    assert error.hint == "ids go from 0 to 31"
    assert "token id -1" in refused([-1]).what
    assert refused(["a"]).what == "a prompt of token ids must be a list of integers"
    assert refused([1.0]).what == "a prompt of token ids must be a list of integers"
    assert refused(3).what == "a prompt of token ids must be a list of integers"


def test_a_prompt_longer_than_the_engine_holds() -> None:
    for length in (64, 65):
        error = refused([1] * length)
        assert error.what == f"the prompt has {length} tokens, but the engine holds 64, output included"
        assert "--max-seq-len" in error.hint
    assert request_of(63).max_tokens == 1


def test_max_tokens_beyond_the_engine_s_limit() -> None:
    error = refused([1] * 60, max_tokens=5)
    assert error.what == "60 prompt tokens and max_tokens 5 make 65, but the engine holds sequences of 64"
    assert error.hint == "max_tokens can be at most 4 here; leave it out to use what is left"
    assert request_of(60, max_tokens=4).max_tokens == 4


def test_max_tokens_left_out_is_what_is_left() -> None:
    assert request_of(10).max_tokens == 54
    # The last token is sampled and never cached: a pool of 16 tokens lets 10 + 7 be.
    assert request_of(10, pool_tokens=16).max_tokens == 7


def test_what_can_never_fit_the_pool() -> None:
    error = refused([1] * 10, max_tokens=8, pool_tokens=16)
    assert error.what == "10 prompt tokens and max_tokens 8 can never fit the KV cache of 16 tokens"
    assert "at most 7" in error.hint
    assert refused([1] * 17, pool_tokens=16).what == "the prompt has 17 tokens, but the KV cache holds 16"
    assert request_of(16, pool_tokens=16).max_tokens == 1


def test_min_tokens_beyond_what_fits() -> None:
    error = refused([1] * 60, min_tokens=5)
    assert error.what == "min_tokens is 5, but only 4 tokens fit after the prompt of 60"


def test_ids_in_the_parameters() -> None:
    assert refused([1], stop_token_ids=[32]).what == "stop_token_ids holds 32, but the vocabulary has 32 tokens"
    assert "allowed_token_ids holds 40" in refused([1], allowed_token_ids=[1, 40]).what
    assert "logit_bias holds 99" in refused([1], logit_bias={99: 1.0}).what
    error = refused([1], allowed_token_ids=[2, 4], stop_token_ids=[4], min_tokens=1)
    assert error.what == "min_tokens is 1, but every id of allowed_token_ids ends the completion"


def test_what_a_request_resolves() -> None:
    request = request_of(3, stop_token_ids=[5], seed=-1)
    assert request.stop_ids == {2, 5} and request.eos_ids == {2} and request.seed == 2**64 - 1
    assert request.prompt_token_ids.dtype == np.int32
    assert request_of(3, ignore_eos=True).stop_ids == set()
    assert request_of(3).seed != request_of(3).seed  # 64 random bits
