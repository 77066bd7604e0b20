"""Sampling parameters of several rows, for tests."""

from __future__ import annotations

import numpy as np

from llmbuild.runtime.sampling_batch import SamplingBatch

FIELDS = ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition", "seeds", "streams")


def make_batch(rows: int, *, extras=None, token_indices=None, **values) -> SamplingBatch:
    """A batch whose fields are scalars for all rows, or lists with one value a row."""
    batch = SamplingBatch.greedy(rows)
    for name, value in values.items():
        assert name in FIELDS
        old = getattr(batch, name)
        batch = batch._replace(**{name: np.broadcast_to(np.asarray(value, old.dtype), old.shape).copy()})
    if token_indices is not None:
        batch = batch._replace(token_indices=np.asarray(token_indices, np.int32))
    return batch._replace(all_greedy=not batch.temperature.any(), extras=None if extras is None else tuple(extras))


def random_logits(seed: int, vocab: int, scale: float, ties: bool) -> np.ndarray:
    """float32 [vocab]; whole numbers, many of them equal, if `ties`."""
    values = np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * np.float32(scale)
    return np.round(values) if ties else values
