"""The random numbers of the sampling kernels: the host's, bit by bit."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.plugins.kernels import sampling_philox
from llmbuild.plugins.kernels.sampling_order import share_of
from llmbuild.runtime.philox import philox4x32, uniform
from support.kernels import run

below = sampling_philox.below
words_of = sampling_philox.philox4x32


@triton.jit
def random_words(counters, keys, words, COUNT: tl.constexpr):
    """words [4, COUNT] of counters [4, COUNT] and keys [2, COUNT], all int32 that stand for uint32."""
    at = tl.arange(0, COUNT)
    c0 = tl.load(counters + at).to(tl.uint32, bitcast=True)
    c1 = tl.load(counters + COUNT + at).to(tl.uint32, bitcast=True)
    c2 = tl.load(counters + 2 * COUNT + at).to(tl.uint32, bitcast=True)
    c3 = tl.load(counters + 3 * COUNT + at).to(tl.uint32, bitcast=True)
    k0 = tl.load(keys + at).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys + COUNT + at).to(tl.uint32, bitcast=True)
    c0, c1, c2, c3 = words_of(c0, c1, c2, c3, k0, k1)
    tl.store(words + at, c0.to(tl.int32, bitcast=True))
    tl.store(words + COUNT + at, c1.to(tl.int32, bitcast=True))
    tl.store(words + 2 * COUNT + at, c2.to(tl.int32, bitcast=True))
    tl.store(words + 3 * COUNT + at, c3.to(tl.int32, bitcast=True))


@triton.jit
def draws(totals, seeds, streams, token_indices, out):
    row = tl.program_id(0)
    tl.store(out + row, below(tl.load(totals + row), row, seeds, streams, token_indices))


@triton.jit
def shares(p, totals, out):
    row = tl.program_id(0)
    tl.store(out + row, share_of(tl.load(p + row), tl.load(totals + row)))


def test_words_are_those_of_the_host() -> None:
    count = 512
    given = np.random.default_rng(1).integers(0, 2**32, (6, count), dtype=np.uint32)
    given[:, :4] = np.array([[0], [1], [2**31], [2**32 - 1]], np.uint32).T
    words = torch.zeros(4, count, dtype=torch.int32)
    run(
        random_words,
        (1,),
        torch.from_numpy(given[:4].view(np.int32)),
        torch.from_numpy(given[4:].view(np.int32)),
        words,
        COUNT=count,
    )
    expected = [philox4x32(tuple(column[:4]), tuple(column[4:])) for column in given.T.tolist()]
    assert words.numpy().view(np.uint32).T.tolist() == [list(row) for row in expected]


def test_draws_are_exact() -> None:
    rng = np.random.default_rng(2)
    rows = 24
    seeds = rng.integers(0, 2**64, rows, dtype=np.uint64)
    streams, indices = rng.integers(0, 8, rows), rng.integers(0, 2**31, rows)
    totals = np.concatenate(([1, 2, 2**62, 2**44], rng.integers(1, 2**62, rows - 4)))
    out = torch.zeros(rows, dtype=torch.int64)
    given = (seeds.view(np.int32), streams.astype(np.int32), indices.astype(np.int32))
    run(draws, (rows,), torch.from_numpy(totals), *map(torch.from_numpy, given), out)
    for row in range(rows):
        bits = int(uniform(int(seeds[row]), int(streams[row]), int(indices[row])) * 2**53)  # exact: 53 bits
        assert out[row].item() == bits * int(totals[row]) >> 53


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1, width=32, exclude_min=True, exclude_max=True), st.integers(1, 2**62)),
        min_size=8,
        max_size=8,
    )
)
def test_shares_are_the_least_that_reach(cases) -> None:
    p = np.array([case[0] for case in cases], np.float32)
    out = torch.zeros(len(cases), dtype=torch.int64)
    run(shares, (len(cases),), torch.from_numpy(p), torch.tensor([case[1] for case in cases]), out)
    for (share, total), found in zip(cases, out.tolist(), strict=True):
        numerator, denominator = share.as_integer_ratio()
        if share >= 2.0**-40:
            assert found == max(1, -(-numerator * total // denominator))
        else:  # of shares that small, bits below 2**-64 are lost
            assert 1 <= found <= max(1, -(-numerator * total // denominator))
