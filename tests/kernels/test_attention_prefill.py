"""Attention over chunks against the plain reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.plugins.kernels.attention_shape import AttentionShape
from llmbuild.plugins.kernels.paged_attention_prefill import PrefillTiling, prefill_spec
from support.attention_cases import FEATURES as COMMON
from support.attention_cases import PLAIN, SM, check, launch, make_case

TILING = PrefillTiling(rows=16, block_n=16, num_warps=4, num_stages=2)
FEATURES = {
    **COMMON,
    "window_longer_than_all": {"window": 500},
}


def attend(
    shape: AttentionShape, lengths: list[tuple[int, int]], tiling: PrefillTiling = TILING, seed: int = 0
) -> None:
    case = make_case(shape, lengths, seed=seed)
    launch(prefill_spec(shape, SM, tiling=tiling, pdl=SM >= 90), case)
    check(case)


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str) -> None:
    """A decoded token among chunks: from the start of a sequence, after cached tokens, of less than a tile."""
    attend(replace(PLAIN, **FEATURES[feature]), [(17, 17), (1, 30), (9, 61)])


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_random_steps(data: st.DataObject) -> None:
    draw = data.draw
    pairs = st.tuples(st.integers(1, 30), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))
    shape = replace(
        PLAIN,
        heads=draw(st.integers(1, 5)),
        window=draw(st.none() | st.integers(1, 100)),
        softcap=draw(st.none() | st.just(2.0)),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
    )
    tiling = replace(TILING, rows=draw(st.sampled_from((32, 64))), block_n=draw(st.sampled_from((16, 32))))
    attend(shape, draw(st.lists(pairs, min_size=1, max_size=2)), tiling, seed=draw(st.integers(0, 99)))


def test_keys_left_of_all_windows_are_not_read() -> None:
    """Their blocks are gone: the table points at NaN there. Windows begin in the middle of a block and of a tile."""
    attend(replace(PLAIN, window=10), [(8, 90), (20, 75)], replace(TILING, block_n=32))


def test_heads_spread_over_several_programs() -> None:
    shape = replace(PLAIN, heads=24, kv_heads=1)
    assert prefill_spec(shape, SM, tiling=TILING).grid[:2] == ("2", "T // 1 + B")
    attend(shape, [(3, 20)])


def test_more_sequences_than_are_counted_at_once() -> None:
    """130 sequences, some without new tokens: padding at the end, and one in between."""
    lengths = [(index % 3, 3 + index % 3) for index in range(128)] + [(2, 21), (0, 0)]
    shape = AttentionShape(1, 1, 16, 16, scale=0.25, dtype="float32", kv_dtype="float32")
    attend(shape, lengths, replace(TILING, rows=32))
