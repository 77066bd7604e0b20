"""Three sequences that join, prefill in chunks, decode beside each other's prompts and alone, over scattered blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmbuild.selftest.tiny_model import VOCAB_SIZE

if TYPE_CHECKING:
    from llmbuild.runtime.executor import StepInput

MAX_BATCH, MAX_TOKENS, MAX_SEQ_LEN = 4, 32, 64
# New tokens of each sequence. All but the first look at what earlier steps have written.
STEPS: tuple[tuple[str, dict[str, int]], ...] = (
    ("prefill", {"a": 9, "b": 17}),
    ("mixed", {"a": 1, "b": 8, "c": 5}),
    ("decode", {"a": 1, "b": 1, "c": 1}),
    ("decode again", {"c": 1, "a": 1, "b": 1}),
)


def steps(num_blocks: int, block_size: int) -> list[tuple[str, StepInput]]:
    """Return (name, step) for each of STEPS; logits of every token are wanted."""
    import numpy as np

    from llmbuild.runtime.executor import StepInput

    random = np.random.default_rng(5)
    each = -(-MAX_SEQ_LEN // block_size)
    free = random.permutation(min(num_blocks, MAX_BATCH * each)).tolist()
    tables: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    made = []
    for name, chunks in STEPS:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, count in chunks.items():
            begin = lengths.get(sequence, 0)
            lengths[sequence] = begin + count
            table = tables.setdefault(sequence, [])
            while len(table) * block_size < lengths[sequence]:
                table.append(free.pop())
            places = range(begin, begin + count)
            ids += random.integers(0, VOCAB_SIZE, count).tolist()
            positions += places
            slots += [table[p // block_size] * block_size + p % block_size for p in places]
            starts.append(len(ids))
        width = max(len(tables[sequence]) for sequence in chunks)
        rows = [tables[sequence] + [0] * (width - len(tables[sequence])) for sequence in chunks]
        seen = [lengths[sequence] for sequence in chunks]
        arrays = (ids, positions, slots, rows, seen, starts, list(range(len(ids))))
        made.append((name, StepInput(*(np.array(array, np.int32) for array in arrays))))
    return made
