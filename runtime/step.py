"""`StepBuilder`: turns a schedule into the arrays of one step.

The state of the running sequences is kept in arrays by batch row, so that a decode step is a handful of numpy calls,
whatever its batch size.
"""

from __future__ import annotations

import numpy as np

from llmbuild.runtime.block_manager import BlockManager
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.sampling_batch import SamplingBatch, SamplingRows, row_extras
from llmbuild.runtime.scheduler import Schedule
from llmbuild.runtime.sequence import Sequence


class StepBuilder:
    """`build` writes into arrays made once: a StepInput is valid until the next `build`."""

    def __init__(self, limits: ServingLimits, blocks: BlockManager) -> None:
        batch, tokens = limits.max_batch_size, limits.max_num_tokens
        self._blocks = blocks
        self._input_ids = np.zeros(tokens, np.int32)
        self._position_ids = np.zeros(tokens, np.int32)
        self._slot_mapping = np.zeros(tokens, np.int32)
        self._seq_lens = np.zeros(batch, np.int32)
        self._cu_q_lens = np.zeros(batch + 1, np.int32)
        self._logits_indices = np.zeros(batch, np.int32)
        self._counting = np.arange(max(limits.max_seq_len, batch + 1), dtype=np.int32)
        self._num_tokens = 0
        self._is_fed = False
        # By batch row.
        self._lengths = np.zeros(batch, np.int32)
        self._prompt_lengths = np.zeros(batch, np.int32)
        self._newest = np.zeros(batch, np.int32)
        # Of the step before, which may still run: where in its sampled rows the newest token is; -1: it is known.
        self._sources = np.full(batch, -1, np.int32)
        self._feed = np.full(tokens, -1, np.int32)
        self._sampling = SamplingRows(batch, limits.num_tokens)
        # The last step's sampled sequences, their rows and parameters: a steady batch reuses them.
        self._sampled: list[Sequence] = []
        self._sampled_rows = np.zeros(0, np.intp)
        self._batch = self._sampling.gather(self._sampled_rows)

    def build(self, schedule: Schedule) -> tuple[StepInput, SamplingBatch, list[Sequence]]:
        """Return the step's arrays, the parameters of its L sampled rows, and the L sequences they belong to."""
        for sequence, _ in schedule.prefills:
            self._load(sequence)
        sampled = schedule.decodes
        if schedule.prefills:
            sampled = sampled + [chunk.sequence for chunk in schedule.prefills if chunk.is_last]
        if sampled != self._sampled:
            self._sampled = list(sampled)
            self._sampled_rows = np.array([sequence.row for sequence in sampled], np.intp)
            self._batch = self._sampling.gather(self._sampled_rows)

        decodes = len(schedule.decodes)
        rows = self._sampled_rows[:decodes]  # decodes come first among the sampled
        step_tokens = self._write_decodes(rows)
        sources = self._sources[rows]
        self._is_fed = bool((sources >= 0).any())
        self._feed[:decodes] = sources
        self._cu_q_lens[: decodes + 1] = self._counting[: decodes + 1]
        self._logits_indices[:decodes] = self._counting[:decodes]
        sequences, wanted = decodes, decodes
        for chunk in schedule.prefills:
            step_tokens = self._write_chunk(chunk.sequence, chunk.length, step_tokens)
            self._seq_lens[sequences] = chunk.sequence.num_cached + chunk.length
            sequences += 1
            self._cu_q_lens[sequences] = step_tokens
            if chunk.is_last:
                self._logits_indices[wanted] = step_tokens - 1
                wanted += 1

        self._num_tokens = step_tokens
        self._feed[decodes:step_tokens] = -1
        if schedule.prefills:
            rows = np.array([s.row for s in schedule.decodes] + [c.sequence.row for c in schedule.prefills], np.intp)
        seq_lens = self._seq_lens[:sequences]
        width = self._blocks.blocks_for(int(seq_lens.max())) if sequences else 0
        step = StepInput(
            self._input_ids[:step_tokens],
            self._position_ids[:step_tokens],
            self._slot_mapping[:step_tokens],
            self._blocks.tables[rows, :width],
            seq_lens,
            self._cu_q_lens[: sequences + 1],
            self._logits_indices[:wanted],
        )
        return step, self._sampling_batch(), self._sampled

    @property
    def feed(self) -> np.ndarray | None:
        """Of the last built step, int32 [T]: for each token its row among those sampled by the step before, -1 where
        `input_ids` holds it. None: it holds all. Valid until the next `build`.
        """
        return self._feed[: self._num_tokens] if self._is_fed else None

    def advance(self) -> None:
        """Make room for the tokens that the last built step samples; `settle` tells them."""
        self._sources[:] = -1
        self._sources[self._sampled_rows] = self._counting[: len(self._sampled_rows)]
        self._newest[self._sampled_rows] = 0
        self._lengths[self._sampled_rows] += 1

    def settle(self, sequence: Sequence, token: int) -> None:
        """Take a token that became known as the newest of its sequence."""
        self._newest[sequence.row] = token
        self._sources[sequence.row] = -1

    def _load(self, sequence: Sequence) -> None:
        """Write the row of a sequence that is not decoding yet."""
        row = sequence.row
        assert row is not None
        self._lengths[row] = sequence.num_tokens
        self._prompt_lengths[row] = sequence.prompt_len
        self._newest[row] = sequence.tokens[-1]
        self._sources[row] = -1
        self._sampling.load(row, sequence)

    def _write_decodes(self, rows: np.ndarray) -> int:
        count, size = len(rows), self._blocks.block_size
        if count == 0:
            return 0
        lengths = self._lengths[rows]
        positions = lengths - 1
        self._input_ids[:count] = self._newest[rows]
        self._position_ids[:count] = positions
        self._slot_mapping[:count] = self._blocks.tables[rows, positions // size] * size + positions % size
        self._seq_lens[:count] = lengths
        return count

    def _write_chunk(self, sequence: Sequence, length: int, at: int) -> int:
        """Write one chunk's tokens at [at, at + length) and return its end.

        tokens:  |---- cached ----|---- chunk ----|-- later --|
                 0              first           last
        """
        first, last, size = sequence.num_cached, sequence.num_cached + length, self._blocks.block_size
        end = at + length
        positions = self._counting[first:last]
        self._input_ids[at:end] = sequence.tokens[first:last]
        self._position_ids[at:end] = positions
        self._slot_mapping[at:end] = self._blocks.table(sequence)[positions // size] * size + positions % size
        return end

    def _sampling_batch(self) -> SamplingBatch:
        batch, sampled, rows = self._batch, self._sampled, self._sampled_rows
        indices = self._lengths[rows] - self._prompt_lengths[rows]
        extras = [row_extras(sequence) for sequence in sampled]
        if all(extra is None for extra in extras):
            return batch._replace(token_indices=indices)
        return batch._replace(token_indices=indices, extras=tuple(extras))

    def check_invariants(self, running: list[Sequence]) -> None:
        """Compare the arrays with the sequences, between steps.

        Raises:
            AssertionError: They differ.
        """
        for sequence in running:
            row = sequence.row
            assert row is not None
            if sequence.num_cached and (
                self._lengths[row] != sequence.num_tokens
                or self._prompt_lengths[row] != sequence.prompt_len
                or self._newest[row] != sequence.tokens[-1]
            ):
                raise AssertionError(f"{sequence}: row {row} of the step arrays is stale")
