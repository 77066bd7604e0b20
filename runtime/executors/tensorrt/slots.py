"""Steps as runs of an engine whose cache is made of slots: padded batches [B, T] over neighbouring slots. Numpy only.

A block of the scheduler is a slot here: it holds one whole sequence. A run takes slots `first .. first + B - 1`, whose
tensors are one piece of memory. All sequences that bring one token form one run, over every slot from the lowest to the
highest of them; prompts form runs of neighbouring slots, padded to the longest chunk.

    step   | d | d | prefill of 5 | d | prefill of 9 |       slots 0, 3, 1, 4, 2
    runs   { slots 0-4, T=1 }   { slots 1-2, T=9 }           slots 1 and 2 of the first are idle

Rows that nobody asked for write keys and values too: an idle row one token behind its sequence's end, a padded row
behind its chunk. Nobody looks there before the sequence itself has overwritten it, and the numbers are finite, so that
a weight of 0 keeps them out. S, how far a run looks into its slots, covers the idle rows for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmbuild.runtime.executor import StepInput

Array = npt.NDArray[Any]
KEY_STEP = 64  # S is a multiple of it: fewer different shapes, and captures, in a conversation


class Run(NamedTuple):
    """One execution of the engine.

    first: Its first slot. inputs: arrays by name. rows: which of the step's logits rows it makes, in its order; the run
    makes one more that nobody wants when there is none.
    """

    first: int
    inputs: dict[str, Array]
    rows: Array

    @property
    def batch(self) -> int:
        return len(self.inputs["write_indices"])


class SlotRuns:
    """Cuts steps into runs, and remembers how much of each slot is filled.

    Args:
        slots: Number of slots.
        capacity: Tokens of a slot.
        prefill_batch: Most prompts, and most logits rows, of one run over prompts.
    """

    def __init__(self, slots: int, capacity: int, *, prefill_batch: int) -> None:
        self.capacity = capacity
        self.prefill_batch = prefill_batch
        self.filled = np.zeros(slots, np.int64)

    def split(self, step: StepInput) -> list[Run]:
        """Return the runs of a step, in an order in which they may be executed."""
        lengths = np.diff(step.cu_q_lens)
        slots = step.block_tables[:, 0]
        runs: list[Run] = []
        decodes = np.flatnonzero(lengths == 1)
        if len(decodes):
            runs += self._runs(step, decodes)
        for group in self._groups(step, np.flatnonzero(lengths > 1)):
            runs += self._runs(step, group)
        self.filled[slots] = step.seq_lens
        return runs

    def _groups(self, step: StepInput, sequences: Array) -> Iterator[Array]:
        """Cut prompts into groups of neighbouring slots that may be padded to the longest of them."""
        slots, lengths = step.block_tables[:, 0], np.diff(step.cu_q_lens)
        begins = step.seq_lens - lengths
        group: list[int] = []
        for sequence in sequences[np.argsort(slots[sequences])]:
            wider = [*group, int(sequence)]
            fits = int(begins[wider].max() + lengths[wider].max()) <= self.capacity
            neighbour = bool(group) and slots[sequence] == slots[group[-1]] + 1
            if group and not (neighbour and fits and len(group) < self.prefill_batch):
                yield np.array(group)
                wider = [int(sequence)]
            group = wider
        if group:
            yield np.array(group)

    def _runs(self, step: StepInput, sequences: Array) -> list[Run]:
        """One run of some sequences, or the same run again where more logits are wanted than it can make."""
        slots, lengths = step.block_tables[sequences, 0], np.diff(step.cu_q_lens)[sequences]
        first, batch = int(slots.min()), int(slots.max() - slots.min()) + 1
        tokens = int(lengths.max())
        # What an idle row overwrites is not there yet: the place behind its sequence's end.
        begins = np.minimum(self.filled[first : first + batch], self.capacity - 1)
        begins[slots - first] = step.seq_lens[sequences] - lengths

        ids = np.zeros((batch, tokens), np.int32)
        place = np.full(len(step.input_ids), -1, np.int64)  # token of the step -> row of the run
        for slot, sequence, length in zip(slots, sequences, lengths, strict=True):
            start = step.cu_q_lens[sequence]
            ids[slot - first, :length] = step.input_ids[start : start + length]
            place[start : start + length] = (slot - first) * tokens + np.arange(length)
        keys = int(begins.max()) + tokens
        keys = min(-(-keys // KEY_STEP) * KEY_STEP, self.capacity)
        inputs = {
            "input_ids": ids,
            "position_ids": (begins[:, None] + np.arange(tokens)).astype(np.int32),
            "write_indices": begins,
            "key_positions": np.arange(keys, dtype=np.int32),
        }
        rows = np.flatnonzero(place[step.logits_indices] >= 0)
        most = batch if tokens == 1 else self.prefill_batch
        pieces = [rows[at : at + most] for at in range(0, len(rows), most)] or [rows]
        return [Run(first, {**inputs, "logits_indices": wanted(place, step, piece)}, piece) for piece in pieces]


def wanted(place: Array, step: StepInput, rows: Array) -> Array:
    """Rows of the run whose logits are wanted, int32; its first where none is, for no run makes none."""
    return place[step.logits_indices[rows]].astype(np.int32) if len(rows) else np.zeros(1, np.int32)
