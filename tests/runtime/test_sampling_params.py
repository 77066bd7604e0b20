from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from llmbuild.errors import RequestError
from llmbuild.runtime.sampling_params import SamplingParams


def test_defaults_are_those_of_vllm_but_for_max_tokens() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.max_tokens is None and params.min_tokens == 0 and params.logprobs is None and params.seed is None
    assert params.skip_special_tokens and not params.ignore_eos and not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 1.5}, "n is 1.5"),
        ({"n": True}, "n is True"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"seed": "7"}, "seed is '7'"),
        ({"seed": 2**64}, f"seed is {2**64}"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias is -1"),
        ({"logit_bias": {1: 101}}, "logit_bias is 101"),
        ({"logit_bias": [1]}, "logit_bias is [1]"),
        ({"allowed_token_ids": [-4]}, "allowed_token_ids is -4"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": ["a", ""]}, "stop is ['a', '']"),
        ({"stop": [1]}, "stop is [1]"),
        ({"stop": 3}, "stop is 3"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"max_tokens": 4.0}, "max_tokens is 4.0"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, but max_tokens is 4"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"n": 2, "temperature": 0}, "n is 2, but temperature 0"),
    ],
)
def test_wrong_values_are_refused_with_the_value_and_what_to_do(given, text) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert caught.value.what.startswith(text)
    assert caught.value.hint


def test_the_error_names_field_value_and_range() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_p=1.5)
    assert str(caught.value) == ("top_p is 1.5\n  where: SamplingParams.top_p\n  next:  allowed: a number in (0, 1]")
    with pytest.raises(RequestError, match=r"allowed: an integer from 0 to 20"):
        SamplingParams(logprobs=30)


def test_accepted_forms() -> None:
    params = SamplingParams(
        stop="x", stop_token_ids=np.array([3, 4]), top_k=-1, temperature=np.float32(0.5), n=np.int64(2)
    )
    assert params.stop == ("x",) and params.stop_token_ids == (3, 4) and params.top_k == 0 and params.n == 2
    assert SamplingParams(seed=-1).seed == -1 and SamplingParams(logprobs=0).logprobs == 0
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_frozen_and_unknown_options_are_type_errors() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
