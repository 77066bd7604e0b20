"""`SamplingBatch`: how each of a step's L logits rows is sampled, as arrays that any device can take.

`SamplingRows` keeps the parameters of the running sequences in arrays by batch row, written once when a sequence
enters, so that a decode step gathers them (or reuses the last gather) instead of visiting Python objects.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmbuild.runtime.sequence import Sequence


class RowExtras(NamedTuple):
    """What only some requests ask for, of one row. None: not asked for.

    prompt, output: int32 token ids that penalties look at. banned: int64 ids that cannot be sampled now.
    bias: (int64 ids, float32 values) added. allowed: int64 ids, the only ones that can be sampled.
    logprobs: how many likeliest tokens to report beside the sampled one.
    """

    prompt: np.ndarray | None = None
    output: np.ndarray | None = None
    banned: np.ndarray | None = None
    bias: tuple[np.ndarray, np.ndarray] | None = None
    allowed: np.ndarray | None = None
    logprobs: int | None = None


class SamplingBatch(NamedTuple):
    """Row l says how logits row l is sampled. L may be 0: a step may hold unfinished prompts only.

    temperature 0 is greedy, top_k 0 is all. `extras` is None when no row has any, else L entries. Logits from
    `num_tokens` on are padding of the model's vocabulary, never sampled nor counted; None: there is no padding.
    """

    temperature: np.ndarray  # float32 [L]
    top_k: np.ndarray  # int32 [L]
    top_p: np.ndarray  # float32 [L]
    min_p: np.ndarray  # float32 [L]
    presence: np.ndarray  # float32 [L]
    frequency: np.ndarray  # float32 [L]
    repetition: np.ndarray  # float32 [L]
    seeds: np.ndarray  # uint64 [L]
    streams: np.ndarray  # int32 [L] which of the request's n completions
    token_indices: np.ndarray  # int32 [L] how many tokens the completion has: the counter of its random numbers
    all_greedy: bool
    extras: tuple[RowExtras | None, ...] | None
    num_tokens: int | None = None

    @staticmethod
    def greedy(rows: int) -> SamplingBatch:
        """Return a batch that takes the most likely token of each of `rows` rows."""
        return SamplingRows(rows).gather(np.arange(rows))


class SamplingRows:
    """The sampling parameters of the running sequences, by batch row."""

    def __init__(self, num_rows: int, num_tokens: int | None = None) -> None:
        self._num_tokens = num_tokens
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._presence = np.zeros(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._repetition = np.ones(num_rows, np.float32)
        self._seeds = np.zeros(num_rows, np.uint64)
        self._streams = np.zeros(num_rows, np.int32)

    def load(self, row: int, sequence: Sequence) -> None:
        """Write the parameters of the sequence that now owns `row`."""
        params = sequence.request.params
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._repetition[row] = params.repetition_penalty
        self._seeds[row] = sequence.request.seed
        self._streams[row] = sequence.index

    def gather(self, rows: np.ndarray) -> SamplingBatch:
        """Return the batch of these rows (int [L]) with token indices 0 and no extras."""
        temperature = self._temperature[rows]
        return SamplingBatch(
            temperature,
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            self._presence[rows],
            self._frequency[rows],
            self._repetition[rows],
            self._seeds[rows],
            self._streams[rows],
            np.zeros(len(rows), np.int32),
            not temperature.any(),
            None,
            self._num_tokens,
        )


def row_extras(sequence: Sequence) -> RowExtras | None:
    """Return what the sequence's next token needs beyond the arrays; None for nothing."""
    request, params = sequence.request, sequence.request.params
    banned = request.stop_array if sequence.num_output < params.min_tokens else None
    if banned is None and not request.has_extras:
        return None
    seen = params.has_penalties
    return RowExtras(
        prompt=request.prompt_token_ids if seen else None,
        output=sequence.output if seen else None,
        banned=banned,
        bias=request.bias_arrays,
        allowed=request.allowed_array,
        logprobs=params.logprobs,
    )
