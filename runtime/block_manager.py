"""`BlockManager`: which blocks of the KV pool hold which sequence, and which are free.

Blocks are counted, not owned, so that sequences can share the blocks of a common prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmbuild.runtime.sequence import Sequence


class BlockManager:
    """Tables of the sequences that hold blocks, one row each; `tables[row, i]` is the block of tokens
    [i * block_size, (i + 1) * block_size), 0 past the sequence's blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, max_sequences: int, max_seq_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        width = -(-max_seq_len // block_size)
        self.tables = np.zeros((max_sequences, width), np.int32)
        self._references = np.zeros(num_blocks, np.int32)
        # Stacks: the block freed last is used first, while it may still be in a cache of the processor.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the sequence's table long enough for `num_tokens`. Return False, changing nothing, when blocks lack."""
        missing = self.blocks_for(num_tokens) - sequence.num_blocks
        if missing > len(self._free):
            return False
        row = self._row_of(sequence)
        if missing > 0:
            taken = self._free[-missing:]
            del self._free[-missing:]
            self.tables[row, sequence.num_blocks : sequence.num_blocks + missing] = taken
            self._references[taken] = 1
            sequence.num_blocks += missing
        return True

    def share(self, sequence: Sequence, owner: Sequence, num_blocks: int) -> None:
        """Start the table of `sequence`, which has none, with the first `num_blocks` blocks of `owner`."""
        blocks = self.table(owner)[:num_blocks]
        self.tables[self._row_of(sequence), :num_blocks] = blocks
        self._references[blocks] += 1
        sequence.num_blocks = num_blocks

    def release(self, sequence: Sequence) -> None:
        """Take back the sequence's row and its hold on its blocks; those that nobody else holds become free."""
        if sequence.row is None:
            return
        blocks = self.table(sequence).copy()
        self._references[blocks] -= 1
        self._free.extend(blocks[self._references[blocks] == 0][::-1].tolist())
        self.tables[sequence.row, : sequence.num_blocks] = 0
        self._free_rows.append(sequence.row)
        sequence.row = None
        sequence.num_blocks = 0

    def table(self, sequence: Sequence) -> np.ndarray:
        """Return the sequence's blocks in token order, int32 [num_blocks] (a view)."""
        return self.tables[sequence.row, : sequence.num_blocks]

    def _row_of(self, sequence: Sequence) -> int:
        if sequence.row is None:
            sequence.row = self._free_rows.pop()
        return sequence.row

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Recompute the bookkeeping from the tables of `holders`, all sequences that hold blocks, and compare.

        Errors are raised, not asserted: the checks must not vanish under `python -O`.

        Raises:
            AssertionError: A block is lost, free twice, free while held, or counted wrongly.
        """
        counted = np.zeros(self.num_blocks, np.int32)
        rows = list(self._free_rows)
        for sequence in holders:
            if sequence.row is None:
                raise AssertionError(f"{sequence} holds no row")
            rows.append(sequence.row)
            table = self.table(sequence)
            if len(set(table.tolist())) != len(table):
                raise AssertionError(f"{sequence} holds a block twice: {table}")
            if self.tables[sequence.row, sequence.num_blocks :].any():
                raise AssertionError(f"{sequence}: its row is not 0 past its blocks")
            if sequence.num_cached > len(table) * self.block_size:
                raise AssertionError(f"{sequence} has only {len(table)} blocks")
            counted[table] += 1
        if not np.array_equal(counted, self._references):
            raise AssertionError("the reference counts differ from the tables")
        if sorted(self._free) != np.flatnonzero(counted == 0).tolist():
            raise AssertionError("the free list differs from the tables")
        if sorted(rows) != list(range(len(self.tables))):
            raise AssertionError(f"rows are lost or doubled: {sorted(rows)}")
        if self.tables[self._free_rows].any():
            raise AssertionError("a free row is not 0")
