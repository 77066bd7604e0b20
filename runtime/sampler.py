"""Sampling on the host, in float32: the cpu target's sampler, and what the devices' samplers are compared with.

The order is: penalties, bias, bans ⇒ temperature ⇒ min-p ⇒ top-k ⇒ top-p ⇒ one draw by inverting the distribution.
Rows are handled one by one, so that a row's token depends on nothing but the row: neither on its batch nor on its
place in it. Ties go to the lowest token id everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmbuild.errors import LLMBuildError
from llmbuild.runtime.philox import uniform
from llmbuild.runtime.sampling_batch import RowExtras, SamplingBatch

__all__ = ["SampledTokens", "SamplingBatch", "TokenLogprobs", "not_finite", "sample"]


class TokenLogprobs(NamedTuple):
    """Of one position: the sampled token first, then the likeliest ones in falling order (it may be among them).

    token_ids: int [1 + k]. logprobs: float32 [1 + k], of the model's own distribution, before any parameter.
    rank: how many tokens are likelier than the sampled one, plus 1.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    rank: int


class SampledTokens(NamedTuple):
    """token_ids: int32 [L]. logprobs: L entries, None where not asked for; None when no row asked."""

    token_ids: np.ndarray
    logprobs: list[TokenLogprobs | None] | None


def sample(logits: np.ndarray, batch: SamplingBatch) -> SampledTokens:
    """Sample one token per row.

    Args:
        logits: float32 [L, V]; not modified. Columns from `batch.num_tokens` on are never sampled.
        batch: L rows of parameters.

    Raises:
        LLMBuildError: A row's logits hold NaN, or nothing but -inf.
    """
    rows, kept = len(logits), batch.num_tokens
    if batch.all_greedy and batch.extras is None:
        token_ids = logits[:, :kept].argmax(axis=1) if rows else np.empty(0, np.int64)
        # argmax stops at the first NaN, so looking at what it picked is enough.
        picked = logits[np.arange(rows), token_ids]
        if not np.isfinite(picked).all():
            raise not_finite(int(np.flatnonzero(~np.isfinite(picked))[0]))
        return SampledTokens(token_ids.astype(np.int32), None)

    token_ids = np.empty(rows, np.int32)
    logprobs: list[TokenLogprobs | None] = [None] * rows
    for row in range(rows):
        extras = batch.extras[row] if batch.extras is not None else None
        values = logits[row] if extras is None else _adjust(logits[row], batch, row, extras)
        token = _pick(values[:kept], batch, row)
        token_ids[row] = token
        if extras is not None and extras.logprobs is not None:
            logprobs[row] = _logprobs(logits[row, :kept], token, extras.logprobs)
    return SampledTokens(token_ids, logprobs if any(entry is not None for entry in logprobs) else None)


def _adjust(logits: np.ndarray, batch: SamplingBatch, row: int, extras: RowExtras) -> np.ndarray:
    """Return a copy of the row with penalties, bias and bans applied."""
    values = logits.astype(np.float32)
    if extras.prompt is not None and extras.output is not None:
        output, counts = np.unique(extras.output, return_counts=True)
        repetition = batch.repetition[row]
        if repetition != 1:
            seen = np.union1d(extras.prompt, output)
            at = values[seen]
            values[seen] = np.where(at > 0, at / repetition, at * repetition)
        values[output] -= batch.frequency[row] * counts.astype(np.float32) + batch.presence[row]
    if extras.bias is not None:
        ids, added = extras.bias
        values[ids] += added
    if extras.allowed is not None:
        kept = values[extras.allowed]
        values.fill(-np.inf)
        values[extras.allowed] = kept
    if extras.banned is not None:
        values[extras.banned] = -np.inf
    return values


def _pick(values: np.ndarray, batch: SamplingBatch, row: int) -> int:
    likeliest = int(values.argmax())
    highest = values[likeliest]
    if not np.isfinite(highest):
        raise not_finite(row)
    temperature = batch.temperature[row]
    if temperature == 0:
        return likeliest
    # Subtracting the highest logit first keeps tiny temperatures from overflowing: every value is <= 0.
    with np.errstate(over="ignore"):
        weights = np.exp((values - highest) / temperature)
    chosen = uniform(int(batch.seeds[row]), int(batch.streams[row]), int(batch.token_indices[row]))
    top_k, top_p, min_p = int(batch.top_k[row]), float(batch.top_p[row]), batch.min_p[row]
    if min_p > 0:
        weights[weights < min_p] = 0  # the highest weight is 1
    if 0 < top_k < len(weights):
        kept = largest(values, top_k)
        if top_p < 1:
            sums = np.cumsum(weights[kept], dtype=np.float64)
            kept = kept[: _reaching(sums, top_p * sums[-1])]
        kept.sort()  # the draw walks the ids in rising order, whatever has cut them
    elif top_p < 1:
        kept = _nucleus(values, weights, temperature, top_p)
    else:
        return _invert(weights, chosen)
    return int(kept[_invert(weights[kept], chosen)])


_BLOCK = 64


def _invert(weights: np.ndarray, chosen: float) -> int:
    """Return the index at which the running sum of `weights` passes `chosen` (in [0, 1)) of their sum.

    The running sum goes over blocks first, then inside the block where the draw falls: most weights are added once.
    """
    whole = len(weights) // _BLOCK * _BLOCK
    by_block = np.append(
        np.add.reduce(weights[:whole].reshape(-1, _BLOCK), axis=1, dtype=np.float64),
        np.add.reduce(weights[whole:], dtype=np.float64),
    )
    sums = np.cumsum(by_block)
    target = chosen * sums[-1]
    block = min(int(np.searchsorted(sums, target, side="right")), len(sums) - 1)
    first = block * _BLOCK
    inside = np.cumsum(weights[first : first + _BLOCK], dtype=np.float64)
    index = first + int(np.searchsorted(inside, target - (sums[block - 1] if block else 0.0), side="right"))
    # Rounding may put the draw past a block's own running sum: then the last token before it that has any weight.
    return index if index < first + len(inside) else int(np.flatnonzero(weights[:index])[-1])


def _reaching(sums: np.ndarray, wanted: float) -> int:
    """Return how many terms the running sums `sums` need to reach `wanted`; all, if rounding keeps them below it."""
    return min(int(np.searchsorted(sums, wanted, side="left")) + 1, len(sums))


_FEW = 256
_BINS = 4096


def _nucleus(values: np.ndarray, weights: np.ndarray, temperature: np.float32, top_p: float) -> np.ndarray:
    """Return the fewest likeliest ids whose weights reach top_p of the sum, in rising order.

    Most often few tokens suffice. In a flat distribution, tokens are counted into bins by how far their logit is below
    the highest, and only the bin in which the nucleus ends is sorted. Logits decide, not weights: a high temperature
    can round different logits to one weight.

        bins:  |--- in, together `inside` ---|-- the end lies here --|--- out ---|
               0                            end                              _BINS
    """
    wanted = top_p * float(np.sum(weights, dtype=np.float64))
    likeliest = largest(values, _FEW)
    sums = np.cumsum(weights[likeliest], dtype=np.float64)
    if sums[-1] >= wanted:
        return np.sort(likeliest[: _reaching(sums, wanted)])
    with np.errstate(over="ignore"):
        # The last bin takes all that is e^-16 or less of the highest.
        below = (values.max() - values) * np.float32(min(_BINS / (16 * float(temperature)), 1e30))
    bins = np.minimum(below, np.float32(_BINS - 1)).astype(np.int32)
    sums = np.cumsum(np.bincount(bins, weights=weights, minlength=_BINS))
    end = _reaching(sums, wanted) - 1
    inside = sums[end - 1] if end > 0 else 0.0
    edge = np.flatnonzero(bins == end)
    edge = edge[np.argsort(-values[edge], kind="stable")]
    needed = _reaching(inside + np.cumsum(weights[edge], dtype=np.float64), wanted)
    kept = bins < end
    kept[edge[:needed]] = True
    return np.flatnonzero(kept)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the `count` largest values (all, if fewer), falling, ties by the lower id.

    The maxima of blocks of 64 bound the count-th largest value from below, so that only few values are sorted.
    """
    blocks = len(values) // _BLOCK
    if count < blocks:
        maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        candidates = np.flatnonzero(values >= np.partition(maxima, blocks - count)[blocks - count])
    else:
        candidates = np.arange(len(values))
    order = np.argsort(-values[candidates], kind="stable")  # stable: candidates are in rising order
    return candidates[order[:count]]


def _logprobs(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    shifted = logits - logits.max()
    normaliser = np.log(np.sum(np.exp(shifted), dtype=np.float64))
    ids = np.concatenate(([token], largest(logits, count))) if count else np.array([token])
    rank = int(np.count_nonzero(logits > logits[token])) + 1
    return TokenLogprobs(ids, (shifted[ids] - normaliser).astype(np.float32), rank)


def not_finite(row: int) -> LLMBuildError:
    """Return the error for a row of logits that no token can be sampled from."""
    return LLMBuildError(
        "the model's logits are not finite: no token can be sampled",
        where=f"logits row {row}",
        hint="check the engine's accuracy against the model, or convert with a wider --dtype",
    )
