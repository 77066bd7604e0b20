"""Full sampling against the host's sampler: the same token, but where rounding decides on which side a draw falls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.plugins.kernels import sampling_edges
from llmbuild.runtime.philox import uniform
from llmbuild.runtime.sampler import sample
from llmbuild.runtime.sampling_batch import SamplingBatch
from support.sampling import sampler_for
from support.sampling_batches import make_batch, random_logits

LISTED: int = sampling_edges.LISTED.value
EDGE = 1e-5  # how far from a draw, as a share of all, its token may be
RANDOM_ROWS = 4096 if torch.cuda.is_available() else 32  # the interpreter takes a tenth of a second for a row


def interval(logits: np.ndarray, batch: SamplingBatch, row: int, token: int) -> tuple[float, float, float]:
    """Return (draw, from, to): where in [0, 1) the token lies in the row's distribution. In float64, by a full sort."""
    values = logits[row, : batch.num_tokens].astype(np.float64)
    weights = np.exp((values - values.max()) / float(batch.temperature[row]))
    weights[weights < batch.min_p[row]] = 0
    order = np.lexsort((np.arange(len(values)), -values))
    if batch.top_k[row] > 0:
        order = order[: batch.top_k[row]]
    sums = np.cumsum(weights[order])
    if batch.top_p[row] < 1:
        order = order[: np.searchsorted(sums, float(batch.top_p[row]) * sums[-1] * (1 - 1e-9)) + 1]
    kept = np.sort(order)
    sums = np.cumsum(weights[kept]) / weights[kept].sum()
    place = int(np.searchsorted(kept, token))
    assert kept[place] == token, "the token is cut"
    draw = uniform(int(batch.seeds[row]), int(batch.streams[row]), int(batch.token_indices[row]))
    return draw, float(sums[place - 1]) if place else 0.0, float(sums[place])


def is_at_min_p(logits: np.ndarray, batch: SamplingBatch, row: int, token: int) -> bool:
    """Whether rounding decides what min-p cuts: a weight within 1e-6 of it, the token's being no less than that."""
    values = logits[row, : batch.num_tokens].astype(np.float64)
    weights = np.exp((values - values.max()) / float(batch.temperature[row]))
    least = float(batch.min_p[row])
    near = np.abs(weights - least) <= 1e-6 * least
    near[values == values.max()] = False
    return bool(near.any()) and weights[token] >= least * (1 - 1e-6)


def differing(logits: np.ndarray, batch: SamplingBatch, found: list[int]) -> int:
    """Return in how many rows the tokens differ from the host's; each of them lies at the draw within EDGE."""
    expected = sample(logits, batch).token_ids.tolist()
    rows = [row for row in range(len(found)) if found[row] != expected[row]]
    for row in rows:
        assert batch.temperature[row] > 0
        if is_at_min_p(logits, batch, row, found[row]):
            continue
        draw, begin, end = interval(logits, batch, row, found[row])
        assert begin - EDGE <= draw <= end + EDGE, f"row {row}: {found[row]}, not {expected[row]}"
    return len(rows)


def random_batch(rng: np.random.Generator, rows: int, **changed) -> SamplingBatch:
    values = {
        "temperature": rng.choice([0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 2.5, 1e6], rows),
        "top_k": rng.choice([0, 0, 1, 2, 7, 50, 5000], rows),
        "top_p": rng.choice([1.0, 1.0, 0.999, 0.95, 0.5, 0.01], rows),
        "min_p": rng.choice([0.0, 0.0, 0.02, 0.3, 1.0], rows),
        "seeds": rng.integers(0, 2**64, rows, dtype=np.uint64),
        "streams": rng.integers(0, 4, rows),
    }
    batch = make_batch(rows, token_indices=rng.integers(0, 5000, rows), **(values | changed))
    return batch._replace(all_greedy=False)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 5, 63, 64, 65, 200, 1000, 4100]),
    padding=st.sampled_from([0, 3]),
    scale=st.sampled_from([0.1, 1.0, 4.0, 30.0]),
    ties=st.booleans(),
)
def test_equals_the_host(seed, vocab, padding, scale, ties) -> None:
    rows = 3
    logits = np.full((rows, vocab + padding), 1e9, np.float32)
    for row in range(rows):
        logits[row, :vocab] = random_logits(seed + row, vocab, scale, ties)
    batch = random_batch(np.random.default_rng(seed), rows)._replace(num_tokens=vocab)
    # A draw may fall on an edge: at a temperature of 1e6 a thousand tokens are equally likely but for rounding.
    assert differing(logits, batch, sampler_for(logits, batch).sample(logits, batch)) <= 1


def test_many_random_rows() -> None:
    rng = np.random.default_rng(11)
    logits = np.stack(
        [random_logits(row, 1500, float(rng.choice([0.5, 2.0, 5.0])), False) for row in range(RANDOM_ROWS)]
    )
    batch = random_batch(rng, RANDOM_ROWS)
    assert differing(logits, batch, sampler_for(logits, batch).sample(logits, batch)) <= RANDOM_ROWS // 1000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits(dtype: str) -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(6, 4200)).astype(np.float32) * 4).to(getattr(torch, dtype)).float()
    batch = random_batch(rng, 6, temperature=1.0)
    found = sampler_for(logits.numpy(), batch, dtype=dtype).sample(logits.numpy(), batch)
    assert differing(logits.numpy(), batch, found) == 0


def test_equal_logits_are_cut_by_id() -> None:
    """Far more equal logits than a list holds: all of the row has to be looked at."""
    vocab = 3 * LISTED
    rng = np.random.default_rng(6)
    logits = np.zeros((4, vocab), np.float32)
    logits[:, rng.permutation(vocab)[:10]] = 1.0
    values = {"temperature": 1.0, "top_k": [0, 500, 500, 0], "top_p": [0.3, 1.0, 0.4, 1.0], "min_p": 0.0}
    batch = random_batch(rng, 4, **values)
    sampler = sampler_for(logits, batch)
    assert differing(logits, batch, sampler.sample(logits, batch)) == 0
    ids = [sorted(np.flatnonzero(row == 0))[490 - 1] for row in logits]
    assert sampler["cut_ids"][1] == ids[1]  # 10 of the 500 are the likelier ones
    weights = np.exp(logits[0].astype(np.float64) - 1)
    order = np.lexsort((np.arange(vocab), -logits[0]))
    last = order[np.searchsorted(np.cumsum(weights[order]), np.float32(0.3) * weights.sum())]
    assert sampler["cut_ids"][0] == last


def test_top_p_that_ends_far_below_the_likeliest() -> None:
    """One token, and 20,000 of e^-16.5 of its weight: the tail is 0.14% of all, and top-p ends in its midst."""
    logits = np.full((1, 20_001), -16.5, np.float32)
    logits[0, 20_000] = 0.0
    batch = make_batch(1, temperature=1.0, top_p=0.9993)
    sampler = sampler_for(logits, batch)
    assert differing(logits, batch, sampler.sample(logits, batch)) == 0
    weight = np.exp(-16.5)
    last = (np.float32(0.9993) * (1 + 20_000 * weight) - 1) / weight
    assert 0.4 < last / 20_000 < 0.6
    assert abs(sampler["cut_ids"][0] - last) < 2


def test_top_k_keeps_exactly_so_many() -> None:
    """Of equal ones the lowest ids; a temperature that rounds all logits to one weight changes nothing."""
    logits = np.repeat(np.array([[1, 5, 5, 0, 5, 5]], np.float32), 12, axis=0)
    batch = make_batch(12, temperature=[1.0, 1e30] * 6, top_k=3, seeds=3, token_indices=np.arange(12))
    sampler = sampler_for(logits, batch)
    assert set(sampler.sample(logits, batch)) == {1, 2, 4}
    assert set(sampler["cut_ids"].tolist()) == {4}


def test_a_row_depends_on_nothing_but_itself() -> None:
    rng = np.random.default_rng(7)
    rows = 10
    logits = rng.normal(size=(rows, 600)).astype(np.float32) * 3
    batch = random_batch(rng, rows)
    together = sampler_for(logits, batch).sample(logits, batch)
    for chosen in (rng.permutation(rows), [4]):
        part = batch._replace(
            **{name: value[chosen] for name, value in batch._asdict().items() if isinstance(value, np.ndarray)}
        )
        found = sampler_for(logits[chosen], part).sample(logits[chosen], part)
        assert found == [together[row] for row in chosen]


def test_a_vocabulary_of_150_thousand() -> None:
    rng = np.random.default_rng(8)
    logits = np.full((2, 150_016), 50.0, np.float32)
    logits[:, :149_990] = rng.normal(size=(2, 149_990)) * 3
    batch = random_batch(rng, 2, temperature=1.0, top_k=[50, 0], top_p=0.95, min_p=0.0)._replace(num_tokens=149_990)
    sampler = sampler_for(logits, batch)
    assert differing(logits, batch, sampler.sample(logits, batch)) == 0
    assert sampler["listed"][0] <= 64  # top-k: hardly more than it keeps; top-p: those of one bin
    assert sampler["listed"][1] <= LISTED
