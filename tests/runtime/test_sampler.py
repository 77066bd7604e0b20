"""The sampler against a plain one, which sorts Python lists and takes its time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.errors import LLMBuildError
from llmbuild.runtime.philox import uniform
from llmbuild.runtime.sampler import SamplingBatch, largest, sample
from llmbuild.runtime.sampling_batch import RowExtras
from support.sampling_batches import make_batch, random_logits


def plain_sample(logits, *, temperature, top_k, top_p, min_p, draw) -> int:
    """Sort everything by (-logit, id), cut, and walk the running sum in the order of the ids."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return order[0]
    weights = np.exp((logits - logits[order[0]]) / np.float32(temperature))
    if min_p > 0:
        weights = np.where(weights < np.float32(min_p), np.float32(0), weights)
    cut_by_k = 0 < top_k < len(order)
    kept = order[:top_k] if cut_by_k else order
    if top_p < 1:
        total, running, cut = math.fsum(float(weights[i]) for i in kept), 0.0, []
        for i in kept:
            cut.append(i)
            running += float(weights[i])
            if running >= float(np.float32(top_p)) * total:
                break
        kept = cut
    kept.sort()
    total, running = sum(float(weights[i]) for i in kept), 0.0
    for i in kept:
        running += float(weights[i])
        if running > draw * total:
            return i
    return [i for i in kept if weights[i] > 0][-1]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 5, 63, 64, 65, 200, 1000]),
    scale=st.sampled_from([0.1, 1.0, 4.0, 30.0]),
    ties=st.booleans(),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 1e6]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    index=st.integers(0, 1000),
)
def test_equals_the_plain_sampler(seed, vocab, scale, ties, temperature, top_k, top_p, min_p, index) -> None:
    logits = random_logits(seed, vocab, scale, ties)
    batch = make_batch(
        1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seed, token_indices=[index]
    )
    expected = plain_sample(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, draw=uniform(seed, 0, index)
    )
    assert sample(logits[None], batch).token_ids.tolist() == [expected]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**9),
    st.sampled_from([1, 64, 130, 700, 5000]),
    st.sampled_from([1, 3, 64, 300, 9999]),
    st.booleans(),
)
def test_largest_equals_a_full_sort(seed, size, count, ties) -> None:
    values = random_logits(seed, size, 3.0, ties)
    expected = sorted(range(size), key=lambda i: (-values[i], i))[:count]
    assert largest(values, count).tolist() == expected


def test_a_row_depends_on_nothing_but_itself() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(32, 777)).astype(np.float32) * 3
    values = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7], 32),
        "top_k": rng.choice([0, 5, 100], 32),
        "top_p": rng.choice([1.0, 0.9], 32),
        "min_p": rng.choice([0.0, 0.05], 32),
        "seeds": rng.integers(0, 2**63, 32, dtype=np.uint64),
        "streams": rng.integers(0, 3, 32),
    }
    indices = rng.integers(0, 100, 32)
    together = sample(logits, make_batch(32, token_indices=indices, **values)).token_ids
    order = rng.permutation(32)
    shuffled = sample(
        logits[order], make_batch(32, token_indices=indices[order], **{k: v[order] for k, v in values.items()})
    )
    assert shuffled.token_ids.tolist() == together[order].tolist()
    for row in range(32):
        alone = make_batch(1, token_indices=indices[row : row + 1], **{k: v[row : row + 1] for k, v in values.items()})
        assert sample(logits[row : row + 1], alone).token_ids[0] == together[row]


def test_frequencies_follow_the_distribution() -> None:
    logits = np.array([[2.0, 1.0, 0.5, -1.0, -3.0]], np.float32)
    draws = 6000
    batch = make_batch(draws, temperature=0.8, seeds=11, token_indices=np.arange(draws))
    counts = np.bincount(sample(np.repeat(logits, draws, axis=0), batch).token_ids, minlength=5)
    weights = np.exp(logits[0].astype(np.float64) / 0.8)
    expected = weights / weights.sum() * draws
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 18.5  # 4 degrees of freedom, p = 0.001; the draws are fixed by the seed


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.array([[1, 5, 5, 0, 5]], np.float32)
    assert sample(logits, SamplingBatch.greedy(1)).token_ids.tolist() == [1]
    for index in range(50):  # top-k 2 of three equal ones keeps ids 1 and 2
        drawn = sample(logits, make_batch(1, temperature=1, top_k=2, seeds=3, token_indices=[index]))
        assert drawn.token_ids[0] in (1, 2)


def test_a_high_temperature_does_not_change_which_tokens_top_k_keeps() -> None:
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    batch = make_batch(200, temperature=1e30, top_k=2, seeds=5, token_indices=np.arange(200))
    assert set(sample(np.repeat(logits, 200, axis=0), batch).token_ids.tolist()) == {2, 3}


def extras(**values) -> list[RowExtras]:
    arrays = {
        k: np.asarray(v, np.int64) if k in ("prompt", "output", "banned", "allowed") else v for k, v in values.items()
    }
    return [RowExtras(**arrays)]


def test_penalties() -> None:
    logits = np.array([[4.0, 3.9, 3.8, -1.0]], np.float32)

    def pick(prompt, output, **values) -> int:
        batch = make_batch(1, extras=extras(prompt=prompt, output=output), **values)
        return int(sample(logits, batch).token_ids[0])

    assert pick([0], [], repetition=1.2) == 1  # 4/1.2 < 3.9: the prompt counts
    assert pick([0], [], presence=1.0, frequency=1.0) == 0  # the prompt does not
    assert pick([], [0], presence=0.15) == 1
    assert pick([], [0, 0, 1], frequency=0.15) == 2  # 3.7, 3.75, 3.8
    assert pick([], [0, 0, 1], presence=0.15) == 0  # 3.85, 3.75, 3.8: presence counts once
    # A negative logit is multiplied: it must not rise.
    negative = np.array([[-1.0, -1.5]], np.float32)
    batch = make_batch(1, repetition=2.0, extras=extras(prompt=[0], output=[]))
    assert sample(negative, batch).token_ids.tolist() == [1]


def test_banned_allowed_and_bias() -> None:
    logits = np.array([[4.0, 3.0, 2.0, 1.0]], np.float32)
    before = logits.copy()

    def pick(**values) -> int:
        return int(sample(logits, make_batch(1, extras=extras(**values))).token_ids[0])

    assert pick(banned=[0, 1]) == 2
    assert pick(allowed=[2, 3]) == 2
    assert pick(allowed=[2, 3], banned=[2]) == 3
    assert pick(bias=(np.array([3]), np.array([10.0], np.float32))) == 3
    assert np.array_equal(logits, before)


def test_logprobs_are_those_of_the_model() -> None:
    logits = np.array([[1.0, 3.0, 2.0, 3.0]], np.float32)
    exact = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    batch = make_batch(1, extras=extras(logprobs=2, banned=[1, 3]))
    result = sample(logits, batch)
    [found] = result.logprobs
    assert result.token_ids.tolist() == [2]
    assert found.token_ids.tolist() == [2, 1, 3] and found.rank == 3
    np.testing.assert_allclose(found.logprobs, exact[[2, 1, 3]], rtol=1e-6)
    [only] = sample(logits, make_batch(1, extras=extras(logprobs=0))).logprobs
    assert only.token_ids.tolist() == [1] and only.rank == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(temperature, bad) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[1, 4] = bad
    with pytest.raises(LLMBuildError, match="logits are not finite") as caught:
        sample(logits, make_batch(3, temperature=temperature))
    assert caught.value.where == "logits row 1"


def test_no_rows() -> None:
    result = sample(np.empty((0, 9), np.float32), SamplingBatch.greedy(0))
    assert result.token_ids.dtype == np.int32 and result.token_ids.shape == (0,) and result.logprobs is None
