"""Split-KV decode against the plain reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.plugins.kernels.paged_attention_decode import MOST_SPLITS, DecodeTiling, decode_plan
from support.attention_cases import FEATURES as COMMON
from support.attention_cases import NAN, PLAIN, SM, check, decode, launch, make_case

TILING = DecodeTiling(block_n=16, num_warps=4, num_stages=2, programs_per_processor=1)
FEATURES = {
    **COMMON,
    "head_112": {"head_dim": 112, "value_dim": 112},
    "float8_plain": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"},
}


def attend(
    shape: AttentionShape, lengths: list[tuple[int, int]], splits: int, most_queries: int, seed: int = 0
) -> None:
    columns = len(lengths) * shape.kv_heads
    plan = decode_plan(shape, 90, most_queries=most_queries, tiling=TILING, processors=splits * columns)
    case = make_case(shape, lengths, seed=seed)
    assert plan.sizes(len(lengths))[0] == splits
    decode(plan, case)
    check(case)


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str) -> None:
    """Sequences of one token (splits without keys) and with a partly filled last block."""
    attend(replace(PLAIN, **FEATURES[feature]), [(1, 1), (1, 77)], splits=3, most_queries=1)


@pytest.mark.parametrize("feature", ["groups", "sinks", "bfloat16", "float8_layer"])
def test_one_split(feature: str) -> None:
    attend(replace(PLAIN, **FEATURES[feature]), [(1, 64), (1, 30)], splits=1, most_queries=1)


@pytest.mark.parametrize(
    ("feature", "splits"),
    [("plain", 1), ("alibi_softcap_window_sinks", 3), ("group_of_3", 3), ("window_1", 1), ("int8_token", 3)],
)
def test_several_queries_are_causal(feature: str, splits: int) -> None:
    attend(replace(PLAIN, **FEATURES[feature]), [(5, 5), (1, 33), (3, 70)], splits, most_queries=5)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_random_steps(data: st.DataObject) -> None:
    draw = data.draw
    most_queries = draw(st.integers(1, 8))
    pairs = st.tuples(st.integers(1, most_queries), st.integers(0, 90)).map(lambda pair: (pair[0], pair[0] + pair[1]))
    shape = replace(
        PLAIN,
        heads=draw(st.integers(1, 5)),
        window=draw(st.none() | st.integers(1, 100)),
        softcap=draw(st.none() | st.just(2.0)),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
    )
    lengths = draw(st.lists(pairs, min_size=1, max_size=2))
    attend(shape, lengths, draw(st.integers(1, 4)), most_queries, seed=draw(st.integers(0, 99)))


def test_sequences_without_tokens_write_nothing() -> None:
    """Rows that pad a batch to a captured size: no new tokens, length 0."""
    plan = decode_plan(PLAIN, SM, tiling=TILING, processors=8)
    case = make_case(PLAIN, [(1, 20), (0, 0), (1, 9), (0, 0)])
    decode(plan, case)
    check(case)


def test_heads_spread_over_several_programs() -> None:
    """40 query heads of one KV head with 2 tokens are 80 rows: more than one tile holds."""
    shape = replace(PLAIN, heads=40, kv_heads=1)
    plan = decode_plan(shape, SM, most_queries=2, tiling=TILING, processors=4)
    assert plan.attend.grid[0] == "2"
    case = make_case(shape, [(2, 40)])
    decode(plan, case)
    check(case)


def test_sinks_are_added_once_whatever_the_splits() -> None:
    shape = replace(PLAIN, sinks=True)
    results = []
    for splits in (1, 2, 5):
        case = make_case(shape, [(1, 80)], sinks=torch.full((2,), 6.0))  # most of the probability
        decode(decode_plan(shape, SM, tiling=TILING, processors=splits), case)
        check(case)
        results.append(case.out)
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sinks", [(-1e4, 0.0), (500.0, 1e4)])
def test_large_scores_do_not_overflow(splits: int, sinks: tuple[float, float]) -> None:
    """Scores of some ±1,000, whose own rounding is 1e-4; sinks far above and below."""
    shape = replace(PLAIN, scale=100.0, sinks=True)
    plan = decode_plan(shape, SM, tiling=TILING, processors=splits)
    case = make_case(shape, [(1, 50)], sinks=torch.tensor(sinks))
    decode(plan, case)
    check(case, tolerance=2e-3)


def test_merge_is_left_out_with_one_split() -> None:
    plan = decode_plan(PLAIN, SM, tiling=TILING, processors=4)
    case = make_case(PLAIN, [(1, 20)] * 4)
    assert plan.sizes(4)[0] == 1
    launch(plan.attend, case, partial=torch.full((1,), NAN), sums=torch.full((1,), NAN))
    check(case)
    launch(plan.merge, case)  # would fail: there is no argument `splits`


def test_sizes_follow_the_batch() -> None:
    shape = AttentionShape(32, 8, 128, 128, scale=0.1)
    plan = decode_plan(shape, 90, tiling=replace(TILING, programs_per_processor=2))
    assert plan.sizes(1) == (33, 33 * 32 * 128 * 4, 33 * 32 * 4)
    assert plan.sizes(16)[0] == 3
    assert plan.sizes(256) == (1, 256 * 32 * 128 * 4, 256 * 32 * 4)
    assert decode_plan(replace(shape, kv_heads=1), 90).sizes(1)[0] == MOST_SPLITS


@pytest.mark.parametrize("most_queries", [0, 9])
def test_refuses_other_numbers_of_queries(most_queries: int) -> None:
    with pytest.raises(ValueError, match=f"most_queries is {most_queries}; 1 to 8 new tokens are decoded at once"):
        decode_plan(PLAIN, SM, most_queries=most_queries)
