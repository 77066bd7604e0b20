"""Penalties, bias and lists on the device: the host's values bit by bit, from counts that follow the sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.runtime import sampler as host
from llmbuild.runtime.sampling_batch import RowExtras, SamplingBatch
from support.sampling import Sampler, sampler_for
from support.sampling_batches import make_batch, random_logits

PENALTIES = {"presence": 0.7, "frequency": -0.3, "repetition": 1.3}


def some_ids(rng: np.random.Generator, vocab: int, most: int) -> np.ndarray:
    return rng.choice(vocab, rng.integers(1, min(most, vocab) + 1), replace=False)


def random_extras(rng: np.random.Generator, vocab: int) -> RowExtras | None:
    """Each part in half of the cases; tokens are in several lists at once."""
    if rng.random() < 0.2:
        return None
    has = rng.random(4) < 0.5
    bias = some_ids(rng, vocab, 6)
    return RowExtras(
        prompt=rng.integers(0, vocab, 9).astype(np.int32) if has[0] else None,
        output=rng.integers(0, min(vocab, 8), rng.integers(0, 12)).astype(np.int32) if has[0] else None,
        bias=(bias, (rng.normal(size=len(bias)) * 5).astype(np.float32)) if has[1] else None,
        allowed=np.sort(some_ids(rng, vocab, 300)) if has[2] else None,
        banned=some_ids(rng, vocab, 5) if has[3] and vocab > 20 else None,
    )


def random_case(seed: int, rows: int, vocab: int) -> tuple[np.ndarray, SamplingBatch]:
    rng = np.random.default_rng(seed)
    logits = np.stack([random_logits(seed + row, vocab, 3.0, row == 1) for row in range(rows)])
    values = {
        "temperature": rng.choice([0.0, 0.8], rows),
        "top_k": rng.choice([0, 5], rows),
        "presence": rng.choice([0.0, 0.5, -1.1], rows),
        "frequency": rng.choice([0.0, 0.3, 1.7], rows),
        "repetition": rng.choice([1.0, 1.2, 0.7], rows),
    }
    extras = [random_extras(rng, vocab) for _ in range(rows)]
    return logits, make_batch(rows, extras=extras, seeds=seed, token_indices=np.arange(rows), **values)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.sampled_from([1, 20, 64, 700]))
def test_values_and_tokens_are_those_of_the_host(seed: int, vocab: int) -> None:
    logits, batch = random_case(seed, 3, vocab)
    assert batch.extras is not None
    expected = [
        logits[row] if extra is None else host._adjust(logits[row], batch, row, extra)
        for row, extra in enumerate(batch.extras)
    ]
    lost = [row for row in range(3) if not np.isfinite(expected[row].max())]  # all that was allowed is banned
    sampler = sampler_for(logits, batch)
    found = sampler.sample(logits, batch)
    np.testing.assert_array_equal(sampler["values"].reshape(3, vocab), expected)
    np.testing.assert_array_equal(sampler["logits"], logits)
    assert [row for row in range(3) if found[row] == -1] == lost
    if not lost:
        assert found == host.sample(logits, batch).token_ids.tolist()


def test_sampled_tokens_are_counted() -> None:
    """Three steps of a sequence with penalties beside one without, and what is counted at the end."""
    vocab, prompt = 90, np.array([5, 5, 80], np.int32)
    sampler = Sampler(96, vocab, 2)
    output = np.empty(0, np.int32)
    rows = [None, 3]  # of counts
    sampler.enter(3, prompt, output)
    for step in range(3):
        logits = np.stack([np.pad(random_logits(step, vocab, 0.5, False), (0, 6)) for _ in rows])
        extras = [None, RowExtras(prompt=prompt, output=output)]
        batch = make_batch(2, extras=extras, **PENALTIES)._replace(num_tokens=vocab)
        expected = host.sample(logits, batch).token_ids
        sampler.load(logits, batch._replace(extras=None))
        sampler["count_rows"][:] = [-1 if row is None else row for row in rows]
        sampler.launch((*sampler.plan.adjusted, *sampler.plan.count))
        assert sampler["token_ids"].tolist() == expected.tolist()
        output = np.append(output, expected[1])
    counts = np.zeros((4, 96), np.int32)
    counts[3, prompt] = 1
    np.add.at(counts[3], output, 2)
    np.testing.assert_array_equal(sampler["counts"].reshape(4, 96), counts)


def test_a_row_of_counts_is_written_anew_in_pieces() -> None:
    sampler = Sampler(64, 64, 1)
    sampler["counts"][:] = 77
    prompt, output = np.arange(50).repeat(3), np.array([1, 60, 60])
    sampler.enter(2, prompt, output, piece=40)
    counts = sampler["counts"].reshape(4, 64)
    expected = np.array([1] * 50 + [0] * 14)
    expected[[1, 60]] += [2, 4]
    assert counts[2].tolist() == expected.tolist()
    assert (counts[[0, 1, 3]] == 77).all()
