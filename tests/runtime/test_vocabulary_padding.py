"""Rows of the vocabulary that the tokenizer has no token for: never sampled, not part of any distribution."""

from __future__ import annotations

import numpy as np
import pytest

from llmbuild import SamplingParams
from llmbuild.errors import RequestError
from llmbuild.runtime.request import make_request
from llmbuild.runtime.sampler import sample
from llmbuild.runtime.sampling_batch import RowExtras, SamplingBatch, SamplingRows
from support.requests import LIMITS

V, TOKENS = 12, 8
LOGITS = np.linspace(0, 5, V, dtype=np.float32)[None]  # padding holds the highest logits


def batch(temperature: float = 0.0, extras: RowExtras | None = None, seed: int = 0) -> SamplingBatch:
    rows = SamplingRows(1, TOKENS).gather(np.zeros(1, np.intp))
    return rows._replace(
        temperature=np.array([temperature], np.float32),
        all_greedy=temperature == 0,
        seeds=np.array([seed], np.uint64),
        extras=None if extras is None else (extras,),
    )


def test_greedy_takes_the_best_token():
    assert sample(LOGITS, batch()).token_ids.tolist() == [TOKENS - 1]


@pytest.mark.parametrize("seed", range(50))
def test_random_draws_stay_below(seed: int):
    assert sample(LOGITS, batch(temperature=5.0, seed=seed)).token_ids[0] < TOKENS


def test_logprobs_are_of_the_tokens_alone():
    found = sample(LOGITS, batch(extras=RowExtras(logprobs=V))).logprobs
    assert found is not None and found[0] is not None
    assert found[0].token_ids.max() < TOKENS
    ids, logprobs = found[0].token_ids[1:], found[0].logprobs[1:].astype(np.float64)
    assert sorted(ids.tolist()) == list(range(TOKENS))
    assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-6)


def test_penalties_may_name_padding_that_the_prompt_held():
    """Prompts of ids may hold any row of the embedding table."""
    rows = batch(extras=RowExtras(prompt=np.array([TOKENS + 1]), output=np.array([TOKENS - 1], np.int32)))
    penalised = rows._replace(repetition=np.array([100.0], np.float32))
    assert sample(LOGITS, penalised).token_ids.tolist() == [TOKENS - 2]


def test_parameters_name_tokens_only():
    limits = LIMITS._replace(num_tokens=20)
    make_request("r", [25], SamplingParams(stop_token_ids=[19]), limits, pool_tokens=64)
    with pytest.raises(RequestError, match="stop_token_ids holds 20, but the vocabulary has 20 tokens"):
        make_request("r", [1], SamplingParams(stop_token_ids=[20]), limits, pool_tokens=64)
