"""Measures against numbers worked out by hand and against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmbuild.builder.accuracy import measures
from llmbuild.builder.accuracy.measures import Comparison, compare, percentile_99, rows_a_step
from llmbuild.builder.accuracy.windows import Encoded, Step, cut, encode, steps
from llmbuild.errors import AccuracyError, ConfigError
from support.tiny_models import BOS, byte_level_tokenizer

LOGITS = st.floats(-60, 60, width=32)


def test_two_tokens_by_hand() -> None:
    """p = (3/4, 1/4) and q = (1/2, 1/2), then p = q; the next token of the first row is 1."""
    reference = np.log(np.array([[0.75, 0.25], [0.5, 0.5]])).astype(np.float32)
    candidate = np.array([[2.0, 2.0], [7.0, 7.0]], np.float32)
    comparison = Comparison()
    comparison.add(reference, candidate, np.array([1]))
    found = comparison.figures()
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert (found.tokens, found.predicted, found.top1) == (2, 1, 1.0)
    assert found.kl_mean == pytest.approx(kl / 2, abs=1e-7)
    assert found.kl_max == pytest.approx(kl, abs=1e-7)
    assert found.kl_p99 == pytest.approx(0.99 * kl, abs=1e-7)
    assert found.reference_ppl == pytest.approx(4, rel=1e-6)
    assert found.candidate_ppl == pytest.approx(2, rel=1e-12)
    assert found.ppl_increase == pytest.approx(-0.5, rel=1e-6)


def test_top1_counts_rows_and_takes_the_first_of_equals() -> None:
    comparison = Comparison()
    reference = np.array([[1, 3, 3], [5, 1, 0], [0, 1, 2]], np.float32)
    candidate = np.array([[1, 3, 0], [5, 5, 0], [0, 2, 1]], np.float32)
    comparison.add(reference, candidate, np.array([0]))
    assert comparison.figures().top1 == pytest.approx(2 / 3)


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 9), st.integers(2, 30), st.integers(1, 40))
def test_equals_torch_in_pieces_of_any_size(data: st.DataObject, rows: int, width: int, elements: int) -> None:
    draw = arrays.arrays(np.float32, (2, rows, width), elements=LOGITS)
    reference, candidate = data.draw(draw)
    targets = np.array(data.draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=rows)))
    comparison = Comparison()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measures.ELEMENTS, "cpu", elements)
        comparison.add(reference, candidate, targets)
    found = comparison.figures()
    first, second = torch.from_numpy(reference).double(), torch.from_numpy(candidate).double()
    log_q = second.log_softmax(-1)
    kl = torch.nn.functional.kl_div(log_q, first.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    assert found.kl_mean == pytest.approx(float(kl.mean()), abs=1e-9)
    assert found.kl_max == pytest.approx(float(kl.max()), abs=1e-9)
    assert found.kl_p99 == pytest.approx(float(kl.quantile(0.99)), abs=1e-9)
    assert found.kl_mean >= 0
    known = torch.from_numpy(targets)
    for logits, perplexity in ((first, found.reference_ppl), (second, found.candidate_ppl)):
        assert perplexity == pytest.approx(
            math.exp(torch.nn.functional.cross_entropy(logits[: len(known)], known)), rel=1e-9
        )
    assert found.top1 == pytest.approx(float((reference.argmax(1) == candidate.argmax(1)).mean()))
    exact, other = (logits - logits.mean(-1, keepdim=True) for logits in (first, second))
    if float(exact.norm()) > 1e-6:
        assert found.logits_error == pytest.approx(float((other - exact).norm() / exact.norm()), rel=1e-6, abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(arrays.arrays(np.float32, (5, 7), elements=LOGITS), st.floats(-100, 100, width=32))
def test_a_model_is_not_far_from_itself_nor_from_itself_shifted(logits: np.ndarray, shift: float) -> None:
    comparison = Comparison()
    comparison.add(logits, logits, np.arange(4))
    found = comparison.figures()
    assert (found.kl_max, found.top1, found.ppl_increase) == (0.0, 1.0, 0.0)
    shifted = Comparison()
    shifted.add(logits, logits + np.float32(shift), np.arange(4))
    assert shifted.figures().kl_max < 1e-3  # what adding to float32 rounds away
    assert found.logits_error == 0.0


def test_tokens_that_cannot_follow() -> None:
    inf = np.float32("inf")
    both = Comparison()
    both.add(np.array([[0, -inf, 0]], np.float32), np.array([[0, -inf, 0]], np.float32), np.array([0]))
    assert both.figures().kl_max == both.figures().logits_error == 0
    only_candidate = Comparison()
    only_candidate.add(np.zeros((1, 3), np.float32), np.array([[0, -inf, 0]], np.float32), np.array([1]))
    found = only_candidate.figures()
    assert math.isinf(found.kl_mean) and math.isinf(found.kl_p99) and math.isinf(found.candidate_ppl)
    assert math.isinf(found.logits_error)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_distribution(value: float) -> None:
    broken = np.array([[0, value, 1]], np.float32)
    with pytest.raises(AccuracyError, match=r"the measured model's logits are no distribution"):
        Comparison().add(np.zeros((1, 3), np.float32), broken, np.array([0]))
    with pytest.raises(AccuracyError, match=r"the reference's logits .*: a row's largest is -inf"):
        Comparison().add(np.full((1, 3), -np.inf, np.float32), np.zeros((1, 3), np.float32), np.array([0]))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentile_equals_numpys(values: list[float]) -> None:
    assert percentile_99(np.array(values)) == pytest.approx(float(np.percentile(values, 99)), rel=1e-9, abs=1e-12)


# --- windows and steps ------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 9))
def test_steps_cover_a_window_once(length: int, chunk: int, block_size: int) -> None:
    window = tuple(range(100, 100 + length))
    ids, targets, slots = [], [], []
    for step, following in steps(window, chunk=chunk, block_size=block_size):
        assert len(step.input_ids) <= chunk
        assert step.seq_lens[0] == step.position_ids[-1] + 1 == len(ids) + len(step.input_ids)
        assert step.logits_indices.tolist() == list(range(len(step.input_ids)))
        blocks = step.block_tables[0]
        assert len(blocks) * block_size >= step.seq_lens[0]
        expected = blocks[step.position_ids // block_size] * block_size + step.position_ids % block_size
        assert step.slot_mapping.tolist() == expected.tolist()
        ids += step.input_ids.tolist()
        targets += following.tolist()
        slots += step.slot_mapping.tolist()
    assert tuple(ids) == window
    assert tuple(targets) == window[1:]
    assert len(set(slots)) == length


def test_comparing_asks_both_for_the_same_tokens() -> None:
    seen: dict[int, list[int]] = {4: [], 16: []}

    def model(size: int, lift: float):
        def forward(step: Step) -> np.ndarray:
            assert step.block_tables.shape[1] == -(-step.seq_lens[0] // size)
            seen[size] += step.input_ids.tolist()
            logits = np.zeros((len(step.input_ids), 50), np.float32)
            logits[:, 3] = lift
            return logits

        return forward

    told: list[tuple[int, int]] = []
    windows = [tuple(range(9)), tuple(range(20, 25))]
    found = compare(
        model(4, 0),
        model(16, 1),
        windows,
        chunk=4,
        block_sizes=(4, 16),
        progress=lambda done, total: told.append((done, total)),
    )
    assert seen[4] == seen[16] == [*range(9), *range(20, 25)]
    assert told == [(4, 14), (8, 14), (9, 14), (13, 14), (14, 14)]
    assert (found.tokens, found.predicted) == (14, 12)
    assert found.reference_ppl == pytest.approx(50)


def test_windows_begin_with_the_prefix_and_leave_no_single_token() -> None:
    found = cut(Encoded(list(range(10)), (77,)), tokens=9, length=5, vocab_size=100, source="x")
    assert found == [(77, 0, 1, 2, 3), (77, 4, 5, 6, 7), (77, 8)]
    assert cut(Encoded(list(range(9)), ()), tokens=9, length=4, vocab_size=100, source="x") == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
    with pytest.raises(ConfigError, match=r"a\.txt gives 1 token\(s\), of which nothing can be predicted"):
        cut(Encoded([5], ()), tokens=9, length=4, vocab_size=100, source="a.txt")
    with pytest.raises(ConfigError, match=r"a\.txt has the token id 300, but the model knows 280"):
        cut(Encoded([5, 300], ()), tokens=9, length=4, vocab_size=280, source="a.txt")


def test_encoding_with_a_tokenizer_that_puts_bos() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level_tokenizer()
    plain = tokenizer.to_str().encode()
    assert encode(plain, "ab", BOS) == Encoded([97, 98], ())
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", BOS)])
    assert encode(tokenizer.to_str().encode(), "ab", BOS) == Encoded([97, 98], (BOS,))
    assert encode(tokenizer.to_str().encode(), "ab", None).prefix == ()
    with pytest.raises(ConfigError, match="the model has no tokenizer"):
        encode(None, "ab", BOS)
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        encode(b"{}", "ab", BOS)


def test_rows_of_logits_stay_small() -> None:
    assert rows_a_step(260, 512) == 512
    assert rows_a_step(50_000, 512) == 335
    assert rows_a_step(250_000, 512) == 67
    assert rows_a_step(250_000, 8) == 8
    assert rows_a_step(1 << 30, 512) == 16
