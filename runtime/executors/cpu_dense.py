"""Host arrays for engines whose attention is made of standard operators (builder/targets/cpu/lower/attention_dense.py).

A run takes sequences that bring the same number of tokens. A step is cut into such runs:

    step   | d | d | d | prefill of 5 | prefill of 9 |     cu_q_lens
    runs   { B=3, Q=1 } { B=1, Q=5 }   { B=1, Q=9 }
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmbuild.runtime.executor import StepInput

Array = npt.NDArray[Any]


class Run(NamedTuple):
    """inputs: arrays by name. rows: which of the step's logits rows this run makes, in its order."""

    inputs: dict[str, Array]
    rows: Array


def split_step(step: StepInput, block_size: int, names: Iterable[str]) -> list[Run]:
    """Cut a step into runs, one for each number of tokens a sequence brings.

    Args:
        names: The graph's inputs: which windows, numbers of kv heads and so on it asks for.
    """
    lengths = np.diff(step.cu_q_lens)
    return [one_run(step, np.flatnonzero(lengths == q), int(q), block_size, names) for q in np.unique(lengths)]


def one_run(step: StepInput, sequences: Array, q: int, block_size: int, names: Iterable[str]) -> Run:
    """Arrays for the given sequences, all of which bring `q` tokens."""
    starts = step.cu_q_lens[sequences]
    tokens = (starts[:, None] + np.arange(q)).reshape(-1)  # [T] of the step, in the run's order
    place = np.full(len(step.input_ids), -1, np.int64)  # token of the step -> row of the run
    place[tokens] = np.arange(len(tokens))
    rows = np.flatnonzero(place[step.logits_indices] >= 0)

    seq_lens = step.seq_lens[sequences]
    positions = np.arange(int(seq_lens.max()))
    tables = step.block_tables[sequences].astype(np.int64)
    blocks = np.minimum(positions // block_size, tables.shape[1] - 1)
    queries = seq_lens[:, None] - q + np.arange(q)  # [B, Q] positions
    distance = positions - queries[:, :, None]  # [B, Q, L] <= 0 for keys that the query may see
    slots = step.slot_mapping[tokens].astype(np.int64)

    inputs: dict[str, Array] = {
        "input_ids": step.input_ids[tokens],
        "position_ids": step.position_ids[tokens],
        "logits_indices": place[step.logits_indices[rows]].astype(np.int32),
        "batch_shape": np.array([len(sequences), q], np.int64),
        "cache_slots": tables[:, blocks] * block_size + positions % block_size,
    }
    for name in names:
        kind, _, value = name.partition(".")
        if kind == "new_slots":
            heads = np.broadcast_to(np.arange(int(value)), (len(slots), int(value)))
            inputs[name] = np.stack([heads, np.broadcast_to(slots[:, None], heads.shape)], axis=-1)
        elif kind == "mask":
            inputs[name] = mask(distance, int(value))
        elif kind == "distance":
            inputs[name] = distance[:, :, None].astype(np.float32)
    return Run(inputs, rows)


def mask(distance: Array, window: int) -> Array:
    """[B, Q, 1, L] float32: 0 where the query may see the key, -inf elsewhere. window 0: no limit."""
    visible = distance <= 0
    if window:
        visible &= distance > -window
    return np.where(visible, np.float32(0), np.float32(-np.inf))[:, :, None]
