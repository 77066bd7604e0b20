from __future__ import annotations

import pytest

from llmbuild.runtime.block_manager import BlockManager
from llmbuild.runtime.scheduler import Scheduler
from llmbuild.runtime.sequence import Sequence, Status
from support.requests import LIMITS, sequence_of


class Bench:
    """A scheduler whose steps append a token to each sequence that is sampled."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, **limits: int) -> None:
        self.limits = LIMITS._replace(**limits)
        self.blocks = BlockManager(
            num_blocks, block_size, max_sequences=self.limits.max_batch_size, max_seq_len=self.limits.max_seq_len
        )
        self.scheduler = Scheduler(self.limits, self.blocks)

    def add(self, *prompt_lens: int) -> list[Sequence]:
        sequences = [sequence_of(length) for length in prompt_lens]
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences

    def step(self) -> list[tuple[Sequence, int]]:
        """Return (sequence, tokens) in the order of the step."""
        step = self.scheduler.schedule()
        sampled = [*step.decodes, *(chunk.sequence for chunk in step.prefills if chunk.is_last)]
        chosen = [*((sequence, 1) for sequence in step.decodes), *step.prefills]
        self.scheduler.commit(step)
        for sequence in sampled:
            sequence.append(9)
        self.scheduler.check_invariants()
        return chosen


def test_prompts_are_cut_to_the_budget_and_packed() -> None:
    bench = Bench(max_num_tokens=10)
    a, b = bench.add(14, 8)
    assert bench.step() == [(a, 10)]
    assert bench.step() == [(a, 4), (b, 6)]
    assert bench.step() == [(a, 1), (b, 2)]
    assert bench.step() == [(a, 1), (b, 1)]


def test_decodes_come_before_prompts() -> None:
    bench = Bench(max_num_tokens=4)
    a, b = bench.add(2, 2)
    bench.step()
    [c] = bench.add(9)
    assert bench.step() == [(a, 1), (b, 1), (c, 2)]
    assert bench.step() == [(a, 1), (b, 1), (c, 2)]


def test_the_batch_is_limited() -> None:
    bench = Bench(max_batch_size=2)
    a, b, c = bench.add(1, 1, 1)
    assert bench.step() == [(a, 1), (b, 1)]
    assert c.status is Status.WAITING
    bench.scheduler.finish(a)
    assert bench.step() == [(b, 1), (c, 1)]


def test_a_budget_below_the_batch_serves_the_oldest() -> None:
    bench = Bench(max_num_tokens=2)
    a, b, c = bench.add(1, 1, 1)
    assert bench.step() == [(a, 1), (b, 1)]
    assert bench.step() == [(a, 1), (b, 1)]
    bench.scheduler.finish(a)
    assert bench.step() == [(b, 1), (c, 1)]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    bench = Bench(num_blocks=4, max_num_tokens=64)
    a, b, c = bench.add(8, 12, 1)
    assert bench.step() == [(a, 8)]  # b needs 3 of the 2 blocks left; c would fit
    assert list(bench.scheduler.waiting) == [b, c]


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    bench = Bench(num_blocks=3)
    a, _ = bench.add(4, 8)
    assert bench.step() == [(a, 4)]  # two blocks are free, b needs two, and a will need one
    assert bench.step() == [(a, 1)]
    assert a.preemptions == 0


def test_the_youngest_is_preempted_and_recomputed() -> None:
    bench = Bench(num_blocks=4, max_num_tokens=64)
    a, b = bench.add(4, 4)
    bench.step()
    for _ in range(4):
        bench.step()
    assert (a.num_blocks, b.num_blocks, bench.blocks.num_free) == (2, 2, 0)
    assert a.num_tokens == b.num_tokens == 9
    assert bench.step() == [(a, 1)]  # a takes b's block for its ninth token
    assert b.status is Status.WAITING and b.preemptions == 1 and b.num_cached == 0 and b.num_tokens == 9
    assert bench.blocks.num_free == 1
    bench.scheduler.finish(a)
    assert bench.step() == [(b, 9)]  # prompt and output, in one chunk
    assert b.num_output == 6


def test_preempted_sequences_keep_their_order() -> None:
    bench = Bench(num_blocks=6, max_num_tokens=64)
    a, b, c = bench.add(4, 4, 4)
    while not c.preemptions:
        bench.step()
    [d] = bench.add(1)
    assert list(bench.scheduler.waiting) == [c, d] and bench.scheduler.running == [a, b]
    while not b.preemptions:
        bench.step()
    assert list(bench.scheduler.waiting) == [b, c, d]


def test_finish_frees_at_once_wherever_the_sequence_stands() -> None:
    bench = Bench(num_blocks=3, max_num_tokens=4)
    a, b = bench.add(8, 4)
    bench.step()  # a is in the middle of its prompt, b waits
    bench.scheduler.finish(b)
    assert not bench.scheduler.waiting
    bench.scheduler.finish(a)
    assert bench.blocks.num_free == 3 and not bench.scheduler.has_work
    bench.scheduler.finish(a)
    assert bench.scheduler.schedule().is_empty


@pytest.mark.parametrize("damage", ["status", "pending", "twice", "waiting"])
def test_check_invariants_finds(damage: str) -> None:
    bench = Bench()
    a, *_, e = bench.add(4, 4, 4, 4, 4)
    bench.step()
    if damage == "status":
        a.status = Status.WAITING
    elif damage == "pending":
        a.num_cached = a.num_tokens
    elif damage == "twice":
        bench.scheduler.running[1] = a
    else:
        e.num_cached = 1
    with pytest.raises(AssertionError):
        bench.scheduler.check_invariants()
