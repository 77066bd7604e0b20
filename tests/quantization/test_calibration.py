"""Observers, statistics and their file against numpy; whatever way the data come, the result is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from llmbuild.errors import ConfigError, ModelError
from llmbuild.quantization.calibration.file import (
    Description,
    InputLayout,
    StatisticsFile,
    StatisticsWriter,
    TextUse,
    merge,
)
from llmbuild.quantization.calibration.histogram import BINS, Histogram
from llmbuild.quantization.calibration.observers import AbsMax, HistogramMse, Percentile, range_end
from llmbuild.quantization.calibration.sample import ROWS
from llmbuild.quantization.calibration.statistics import InputStatistics

values = st.one_of(st.floats(-1e4, 1e4, width=32), st.sampled_from([0.0, -0.0, 1e-45, 1.0, 2.0, -2048.0, 3e38]))
samples = arrays(np.float32, st.integers(0, 60), elements=values)


def histogram_of(*parts: np.ndarray) -> Histogram:
    found = Histogram()
    for part in parts:
        found.add(torch.from_numpy(part))
    return found


@settings(max_examples=100, deadline=None)
@given(samples, samples)
def test_a_histogram_is_that_of_numpy_and_does_not_depend_on_the_order(first: np.ndarray, second: np.ndarray) -> None:
    together = np.abs(np.concatenate((first, second))).astype(np.float64)
    found = histogram_of(first, second)
    if found.exponent is None:
        assert not together.any() and int(found.counts[0]) == together.size
        return
    top = 2.0**found.exponent
    assert top / 2 <= together.max() < top
    expected, _ = np.histogram(together, bins=BINS, range=(0, top))
    assert found.counts.numpy().tolist() == expected.tolist()
    for other in (histogram_of(second, first), histogram_of(np.concatenate((second, first)))):
        assert other.counts.equal(found.counts) and other.exponent == found.exponent
    for a, b in ((first, second), (second, first)):
        merged = histogram_of(a)
        merged.merge(histogram_of(b))
        assert merged.counts.equal(found.counts) and merged.exponent == found.exponent


DRAWN = np.random.default_rng(0).standard_t(3, 20_000).astype(np.float32)


def test_observers_choose_the_range_that_numpy_does() -> None:
    found, magnitudes = histogram_of(DRAWN), np.abs(DRAWN.astype(np.float64))
    top, width = float(magnitudes.max()), float(histogram_of(DRAWN).edges[0])
    assert range_end(AbsMax(), found, top) == top
    for percent in (50, 99, 99.9):
        exact = np.percentile(magnitudes, percent, method="inverted_cdf")
        assert exact <= range_end(Percentile(percent), found, top) <= exact + width
    assert range_end(Percentile(100), found, top) == top


@pytest.mark.parametrize("levels", [7, 127])
def test_the_square_error_is_least_where_numpy_finds_it(levels: int) -> None:
    found, magnitudes = histogram_of(DRAWN), np.abs(DRAWN.astype(np.float64))
    top = float(magnitudes.max())

    def error(end: float) -> float:
        step = end / levels
        return float(np.square(np.minimum(np.round(magnitudes / step), levels) * step - magnitudes).sum())

    chosen = range_end(HistogramMse(levels), found, top)
    best = min(error(top * place / 128) for place in range(1, 129))
    assert error(chosen) <= 1.01 * best
    if levels == 7:
        assert chosen < 0.8 * top  # the tail is clipped


def test_nothing_but_zeros_has_no_range() -> None:
    found = histogram_of(np.zeros(5, np.float32))
    assert all(range_end(observer, found, 0.0) == 0 for observer in (AbsMax(), Percentile(99), HistogramMse()))


def test_observers_refuse_nonsense() -> None:
    with pytest.raises(ConfigError, match="a percentile lies above 0 and is at most 100, not 101"):
        Percentile(101)
    with pytest.raises(ConfigError, match="0 levels"):
        HistogramMse(0)


def some_rows(seed: int, rows: int = 7) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))


def gathered(*parts: torch.Tensor, gram: bool = True) -> InputStatistics:
    found = InputStatistics.empty(5, gram=gram)
    for number, part in enumerate(parts):
        found.add(part, name="w", window=number)
    return found


def test_statistics_are_those_of_numpy() -> None:
    first, second = some_rows(1), some_rows(2, 3)
    found, x = gathered(first, second), torch.cat((first, second)).double().numpy()
    assert found.rows == 10
    np.testing.assert_array_equal(found.absmax.numpy(), np.abs(x).max(0))
    np.testing.assert_allclose(found.mean.numpy(), np.abs(x).mean(0), rtol=1e-12)
    assert found.gram is not None
    np.testing.assert_allclose(found.gram.numpy(), x.T @ x, rtol=1e-5, atol=1e-5)


def test_merged_statistics_are_those_of_all_rows() -> None:
    merged, whole = gathered(some_rows(1)), gathered(some_rows(1), some_rows(2))
    merged.merge(gathered(some_rows(2)))
    assert merged.rows == whole.rows and merged.absmax.equal(whole.absmax)
    assert merged.histogram.counts.equal(whole.histogram.counts)
    assert merged.gram is not None and whole.gram is not None
    torch.testing.assert_close(merged.total, whole.total)
    torch.testing.assert_close(merged.gram, whole.gram)
    with pytest.raises(ValueError, match="different inputs"):
        merged.merge(gathered(some_rows(2), gram=False))


@pytest.mark.parametrize(("bad", "shown"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_what_is_not_finite_is_refused_by_layer_and_place(bad: float, shown: str) -> None:
    x = some_rows(1)
    x[4, 2] = bad
    with pytest.raises(ModelError) as caught:
        InputStatistics.empty(5, gram=False).add(x, name="model.layers.3.mlp.down_proj.weight", window=6)
    text = str(caught.value)
    assert f"the input of 'model.layers.3.mlp.down_proj.weight' holds {shown} during calibration" in text
    assert "window 6, token 4, channel 2" in text


def test_the_sample_holds_the_same_rows_in_whatever_order_they_come() -> None:
    rows = [torch.randn(150, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    whole, backwards, merged = gathered(*rows).sample, gathered(*reversed(rows)).sample, gathered(rows[2])
    merged.merge(gathered(rows[1], rows[0], rows[0]))  # the same rows twice count once
    for other in (backwards, merged.sample):
        assert other.rows.equal(whole.rows) and other.priorities.equal(whole.priorities)
    assert whole.rows.shape == (ROWS, 5) and bool((whole.priorities[1:] > whole.priorities[:-1]).all())
    everything = {tuple(row.tolist()) for part in rows for row in part}
    assert all(tuple(row.tolist()) in everything for row in whole.rows)
    shares = [sum(tuple(row.tolist()) in {tuple(r.tolist()) for r in part} for row in whole.rows) for part in rows]
    assert min(shares) > ROWS / 6  # of all parts of the text


def test_few_rows_are_all_kept() -> None:
    assert sorted(map(tuple, gathered(some_rows(1)).sample.rows.tolist())) == sorted(map(tuple, some_rows(1).tolist()))


def test_squares_that_overflow_are_refused() -> None:
    with pytest.raises(ModelError, match="too large to be squared"):
        gathered(some_rows(1) * 1e25)


DESCRIPTION = Description(
    model="tiny",
    model_sha256="0" * 64,
    dtype="float32",
    window=8,
    texts=(TextUse("text", "1" * 64, 16),),
    versions={"torch": "x"},
    inputs={
        "a.weight": InputLayout(5, ("a.weight", "b.weight"), True),
        "c.weight": InputLayout(5, ("c.weight",), False),
    },
)


def written(path: Path, seed: int, description: Description = DESCRIPTION) -> Path:
    with StatisticsWriter(path, description) as writer:
        writer.write("c.weight", gathered(some_rows(seed + 1), gram=False))
        writer.write("a.weight", gathered(some_rows(seed)))
    return path


def test_a_file_gives_back_what_was_written_and_is_always_the_same(tmp_path: Path) -> None:
    file, wanted = StatisticsFile(written(tmp_path / "s", 1)), gathered(some_rows(1))
    found = file.read("a.weight")
    assert file.description == DESCRIPTION
    assert file.key_of("b.weight") == "a.weight" and file.key_of("d.weight") is None
    assert found.rows == wanted.rows and found.absmax.equal(wanted.absmax) and found.total.equal(wanted.total)
    assert found.gram is not None and wanted.gram is not None and found.gram.equal(wanted.gram)
    assert (
        found.histogram.counts.equal(wanted.histogram.counts) and found.histogram.exponent == wanted.histogram.exponent
    )
    assert file.read("c.weight").gram is None
    assert found.sample.rows.equal(wanted.sample.rows) and found.sample.priorities.equal(wanted.sample.priorities)
    assert file.sample("a.weight").equal(wanted.sample.rows) and file.absmax("a.weight").equal(wanted.absmax)
    assert file.mean("a.weight").equal(wanted.mean) and wanted.gram.equal(file.gram("a.weight"))
    assert written(tmp_path / "t", 1).read_bytes() == (tmp_path / "s").read_bytes()
    assert StatisticsFile(written(tmp_path / "u", 2)).sha256 != file.sha256
    assert not list(tmp_path.glob("*.partial"))


def test_merged_files_hold_the_statistics_of_both(tmp_path: Path) -> None:
    second = replace(DESCRIPTION, texts=(TextUse("second", "3" * 64, 60),))
    paths = [written(tmp_path / "s", 1), written(tmp_path / "t", 3, second)]
    merge(paths, tmp_path / "both")
    found, wanted = StatisticsFile(tmp_path / "both"), gathered(some_rows(1), some_rows(3))
    assert found.description.texts == (*DESCRIPTION.texts, *second.texts)
    read = found.read("a.weight")
    assert read.rows == wanted.rows and read.gram is not None and wanted.gram is not None
    torch.testing.assert_close(read.gram, wanted.gram)
    assert read.histogram.counts.equal(wanted.histogram.counts)


def test_files_of_different_models_are_not_merged(tmp_path: Path) -> None:
    other = replace(DESCRIPTION, model_sha256="2" * 64)
    with pytest.raises(ConfigError, match=f"models {DESCRIPTION.model} and {DESCRIPTION.model} .other files of it."):
        merge([written(tmp_path / "s", 1), written(tmp_path / "t", 1, other)], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_what_is_no_statistics_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("hello")
    save_file({"x": torch.zeros(1)}, tmp_path / "tensors")
    for name in ("text", "tensors"):
        with pytest.raises(ConfigError, match=r"not a file of calibration statistics(.|\n)*--calibration"):
            StatisticsFile(tmp_path / name)


def test_a_file_that_is_interrupted_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), StatisticsWriter(tmp_path / "s", DESCRIPTION) as writer:
        writer.write("a.weight", gathered(some_rows(1)))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
