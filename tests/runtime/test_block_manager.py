from __future__ import annotations

import numpy as np
import pytest

from llmbuild.runtime.block_manager import BlockManager
from support.requests import sequence_of


def manager(num_blocks: int = 6, block_size: int = 4, max_sequences: int = 3) -> BlockManager:
    return BlockManager(num_blocks, block_size, max_sequences=max_sequences, max_seq_len=24)


def test_blocks_come_as_tokens_do_and_go_back() -> None:
    blocks, sequence = manager(), sequence_of(5)
    assert blocks.allocate(sequence, 5) and sequence.num_blocks == 2 and blocks.num_free == 4
    assert blocks.allocate(sequence, 8) and sequence.num_blocks == 2
    assert blocks.allocate(sequence, 9) and sequence.num_blocks == 3
    blocks.check_invariants([sequence])
    blocks.release(sequence)
    assert blocks.num_free == 6 and sequence.row is None and sequence.num_blocks == 0
    blocks.release(sequence)  # twice is once
    assert blocks.num_free == 6
    blocks.check_invariants([])


def test_too_few_blocks_change_nothing() -> None:
    blocks, first, second = manager(num_blocks=3), sequence_of(8), sequence_of(8)
    assert blocks.allocate(first, 8)
    assert not blocks.allocate(second, 8)
    assert second.row is None and second.num_blocks == 0 and blocks.num_free == 1
    blocks.check_invariants([first])


def test_tables_are_padded_with_zero() -> None:
    blocks, first, second = manager(), sequence_of(9), sequence_of(2)
    blocks.allocate(first, 9)
    row = first.row
    blocks.release(first)
    blocks.allocate(second, 2)
    assert second.row == row and np.count_nonzero(blocks.tables[row, 1:]) == 0


def test_shared_blocks_are_free_when_the_last_holder_goes() -> None:
    blocks, owner, sharer = manager(), sequence_of(12), sequence_of(12)
    blocks.allocate(owner, 12)
    blocks.share(sharer, owner, 2)
    assert blocks.allocate(sharer, 12) and blocks.num_free == 2
    assert blocks.table(sharer)[:2].tolist() == blocks.table(owner)[:2].tolist()
    assert blocks.table(sharer)[2] != blocks.table(owner)[2]
    blocks.check_invariants([owner, sharer])
    blocks.release(owner)
    assert blocks.num_free == 3
    blocks.check_invariants([sharer])
    blocks.release(sharer)
    assert blocks.num_free == 6
    blocks.check_invariants([])


def break_reference(blocks, sequence) -> None:
    blocks._references[blocks.table(sequence)[0]] += 1


def break_free_list(blocks, sequence) -> None:
    blocks._free.append(int(blocks.table(sequence)[0]))


def lose_block(blocks, sequence) -> None:
    blocks._free.pop()


def swap_block(blocks, sequence) -> None:
    blocks.tables[sequence.row, 0] = blocks.tables[sequence.row, 1]


def lose_row(blocks, sequence) -> None:
    blocks._free_rows.pop()


def leave_rest(blocks, sequence) -> None:
    blocks.tables[blocks._free_rows[0], 0] = 1


def write_past_end(blocks, sequence) -> None:
    blocks.tables[sequence.row, sequence.num_blocks] = 5


def cache_too_much(blocks, sequence) -> None:
    sequence.num_cached = 9


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (break_reference, "reference counts"),
        (break_free_list, "free list"),
        (lose_block, "free list"),
        (swap_block, "holds a block twice"),
        (lose_row, "rows are lost"),
        (leave_rest, "a free row is not 0"),
        (write_past_end, "not 0 past its blocks"),
        (cache_too_much, "has only 2 blocks"),
    ],
)
def test_check_invariants_finds(damage, text) -> None:
    blocks, sequence = manager(), sequence_of(8)
    blocks.allocate(sequence, 8)
    damage(blocks, sequence)
    with pytest.raises(AssertionError, match=text):
        blocks.check_invariants([sequence])
