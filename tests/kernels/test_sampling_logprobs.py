"""Log-probabilities on the device against the host's, and tokens that are fed to the next step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.plugins.kernels.sampling_logprobs import MOST_LOGPROBS
from llmbuild.runtime.sampler import sample
from llmbuild.runtime.sampling_batch import RowExtras
from llmbuild.runtime.sampling_params import MAX_LOGPROBS
from support.sampling import Sampler, sampler_for
from support.sampling_batches import make_batch, random_logits


def test_as_many_are_reported_as_may_be_asked_for() -> None:
    assert MOST_LOGPROBS == MAX_LOGPROBS


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([20, 64, 500, 4200]),
    scale=st.sampled_from([0.5, 4.0]),
    ties=st.booleans(),
    counts=st.lists(st.sampled_from([None, 0, 1, 5, 20]), min_size=3, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_equals_the_host(seed, vocab, scale, ties, counts, dtype) -> None:
    logits = np.stack(
        [np.pad(random_logits(seed + row, vocab, scale, ties), (0, 4), constant_values=9e9) for row in range(3)]
    )
    logits[2, : vocab // 2] = -np.inf
    logits = torch.from_numpy(logits).to(getattr(torch, dtype)).float().numpy()
    extras = [None if count is None else RowExtras(logprobs=count, banned=np.array([vocab - 1])) for count in counts]
    batch = make_batch(3, temperature=1.5, seeds=seed, token_indices=range(3), extras=extras)._replace(num_tokens=vocab)
    expected = sample(logits, batch)
    sampler = sampler_for(logits, batch, dtype=dtype)
    assert sampler.sample(logits, batch) == expected.token_ids.tolist()
    ids = sampler["logprob_ids"].reshape(3, 1 + MOST_LOGPROBS)
    values = sampler["logprobs"].reshape(3, 1 + MOST_LOGPROBS)
    for row, wanted in enumerate(expected.logprobs or [None] * 3):
        if wanted is None:
            assert not ids[row].any() and not values[row].any()
            continue
        number = len(wanted.token_ids)
        assert ids[row, :number].tolist() == wanted.token_ids.tolist()
        np.testing.assert_allclose(values[row, :number], wanted.logprobs, rtol=2e-6, atol=2e-6)
        assert sampler["ranks"][row] == wanted.rank
        assert not ids[row, number:].any()


def test_log_probabilities_of_rows_that_are_sampled_without_extras() -> None:
    logits = random_logits(4, 100, 2.0, False)[None]
    batch = make_batch(1, extras=[RowExtras(logprobs=2)])
    sampler = sampler_for(logits, batch)
    sampler.load(logits, batch)
    sampler.launch((*sampler.plan.greedy, *sampler.plan.logprobs))
    assert sampler["logprob_ids"][:3].tolist() == [logits.argmax(), *np.argsort(-logits[0])[:2]]
    assert sampler["ranks"].tolist() == [1]


@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_tokens_are_fed_where_a_source_is_named(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    sampler = Sampler(64, 64, 5, tokens=tokens)
    sampler["token_ids"][:] = [11, 12, 13, 14, 15]
    sampler["input_ids"][:] = before = rng.integers(0, 9, tokens)
    sampler["feed_sources"][:] = sources = rng.integers(-2, 5, tokens)
    sampler.launch(sampler.plan.feed)
    assert sampler["input_ids"].tolist() == np.where(sources >= 0, 11 + sources, before).tolist()
