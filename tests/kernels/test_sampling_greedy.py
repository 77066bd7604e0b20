"""The likeliest token of each row, and logits from which none can be taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.plugins.kernels.kv_store import FLOATS
from llmbuild.runtime.sampling_batch import SamplingBatch
from support.sampling import Sampler, sampler_for
from support.sampling_batches import make_batch, random_logits

BAD = {
    "nan": lambda row: row.__setitem__(7, np.nan),
    "negative nan": lambda row: row.view(np.uint32).__setitem__(7, 0xFFC00000),
    "infinity": lambda row: row.__setitem__(7, np.inf),
    "nothing": lambda row: row.fill(-np.inf),
}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 300, 4096, 4097, 9000]),
    padding=st.sampled_from([0, 1, 60]),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    ties=st.booleans(),
    dtype=st.sampled_from(FLOATS),
)
def test_equals_argmax(seed, rows, vocab, padding, scale, ties, dtype) -> None:
    logits = np.full((rows, vocab + padding), np.inf, np.float32)  # what is padding is never looked at
    for row in range(rows):
        logits[row, :vocab] = random_logits(seed + row, vocab, scale, ties)
    batch = SamplingBatch.greedy(rows)._replace(num_tokens=vocab)
    seen = torch.from_numpy(logits).to(getattr(torch, dtype)).float().numpy()
    assert sampler_for(logits, batch, dtype=dtype).sample(logits, batch) == seen[:, :vocab].argmax(axis=1).tolist()


def test_equal_logits_and_both_zeros_go_to_the_lowest_id() -> None:
    logits = np.full((3, 5000), -1.0, np.float32)
    logits[0, [4999, 4500, 77, 78]] = 3.0
    logits[1, 4200], logits[1, 4300] = -0.0, 0.0
    logits[2, 0] = -np.inf
    batch = SamplingBatch.greedy(3)
    assert sampler_for(logits, batch).sample(logits, batch) == [77, 4200, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", BAD)
def test_a_row_that_is_not_finite_has_a_status_and_a_legal_token(bad: str, temperature: float) -> None:
    logits = random_logits(3, 400, 2.0, False)[None].repeat(3, axis=0)
    BAD[bad](logits[1])
    batch = make_batch(3, temperature=[temperature, temperature, 0.0], top_k=20, top_p=0.9)
    sampler = sampler_for(logits, batch)
    tokens = sampler.sample(logits, batch)
    assert sampler["status"].tolist() == [0, 1, 0]
    assert sampler["token_ids"][1] == 0
    assert tokens[2] == logits[2].argmax() and tokens[0] >= 0


def test_a_row_of_mostly_minus_infinity() -> None:
    logits = np.full((2, 4500), -np.inf, np.float32)
    logits[:, 4321] = -1e30
    batch = make_batch(2, temperature=[0.0, 1.0], top_k=5, top_p=0.5)
    assert sampler_for(logits, batch).sample(logits, batch) == [4321, 4321]


def test_no_rows_launch_nothing() -> None:
    sampler = Sampler(320, 300, 0)
    batch = SamplingBatch.greedy(0)
    assert sampler.sample(np.empty((0, 320), np.float32), batch) == []
    sampler.launch((*sampler.plan.full, *sampler.plan.adjusted, *sampler.plan.logprobs, *sampler.plan.count))


def test_a_vocabulary_of_150_thousand() -> None:
    logits = random_logits(5, 150_016, 3.0, False)[None]
    logits[0, 149_999:] = 99.0
    logits[0, 140_001] = 40.0
    batch = SamplingBatch.greedy(1)._replace(num_tokens=149_999)
    assert sampler_for(logits, batch, dtype="bfloat16").sample(logits, batch) == [140_001]
