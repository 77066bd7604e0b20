"""`Scheduler`: which sequences run in the next step, and with how many tokens each.

One budget of tokens a step. Decodes come first, then the prompts in progress, then new ones, each group in order of
arrival; a prompt longer than what is left is cut into chunks. Arrival order is strict: nobody overtakes the head of
the queue, so that nobody starves.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from llmbuild.runtime.block_manager import BlockManager
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.sequence import Sequence, Status


class Chunk(NamedTuple):
    """The next `length` pending tokens of a sequence."""

    sequence: Sequence
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one can be sampled."""
        return self.length == self.sequence.num_pending


class Schedule(NamedTuple):
    """One step. decodes: one token each. prefills: chunks of prompts, or of preempted sequences."""

    decodes: list[Sequence]
    prefills: list[Chunk]

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills

    def without_finished(self) -> Schedule:
        """Return the step without sequences that have ended since it was chosen."""
        return Schedule(
            [sequence for sequence in self.decodes if sequence.status is Status.RUNNING],
            [chunk for chunk in self.prefills if chunk.sequence.status is Status.RUNNING],
        )


class Scheduler:
    """Both queues are in order of arrival, and everybody in `running` arrived before everybody in `waiting`."""

    def __init__(self, limits: ServingLimits, blocks: BlockManager) -> None:
        self._limits = limits
        self._blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Drop the sequence, wherever it stands, and free its blocks at once. Twice is once."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._blocks.release(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> Schedule:
        """Choose the next step's tokens and give them blocks. Empty only when there is no work."""
        step = Schedule([], [])
        budget = self._schedule_decodes(step, self._limits.max_num_tokens)
        budget = self._continue_prefills(step, budget)
        # Whoever was preempted just now stands at the head of the queue and cannot come back in this step: less is
        # free than it held.
        self._admit(step, budget)
        return step

    def commit(self, step: Schedule) -> None:
        """Note that the step has run: its tokens are cached."""
        for sequence in step.decodes:
            sequence.num_cached += 1
        for sequence, length in step.prefills:
            sequence.num_cached += length

    def _schedule_decodes(self, step: Schedule, budget: int) -> int:
        size, index = self._blocks.block_size, 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            index += 1
            if sequence.num_pending != 1 or sequence.is_complete:
                continue
            if sequence.num_tokens <= sequence.num_blocks * size or self._make_room(sequence):
                step.decodes.append(sequence)
                budget -= 1
        return budget

    def _make_room(self, sequence: Sequence) -> bool:
        """Give the sequence a block for its newest token, preempting from the youngest until there is one.

        The victims stand behind the sequence, so they are not in the step yet. The oldest can always be served:
        admission has checked that it fits alone.
        """
        while not self._blocks.allocate(sequence, sequence.num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its tokens are kept and will be computed again."""
        self._blocks.release(sequence)
        sequence.num_cached = 0
        sequence.preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def _continue_prefills(self, step: Schedule, budget: int) -> int:
        for sequence in self.running:
            if budget == 0:
                break
            if sequence.num_pending > 1:
                budget -= self._add_chunk(step, sequence, budget)
        return budget

    def _admit(self, step: Schedule, budget: int) -> None:
        while budget > 0 and self.waiting and len(self.running) < self._limits.max_batch_size:
            sequence = self.waiting[0]
            # All its blocks now, so that a prompt never stops halfway for want of them; and one block left for each
            # running sequence, so that those do not have to preempt it again at once.
            needed = self._blocks.blocks_for(sequence.num_tokens) + len(self.running)
            if needed > self._blocks.num_free:
                break
            self._blocks.allocate(sequence, sequence.num_tokens)
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            budget -= self._add_chunk(step, sequence, budget)

    def _add_chunk(self, step: Schedule, sequence: Sequence, budget: int) -> int:
        length = min(sequence.num_pending, budget)
        step.prefills.append(Chunk(sequence, length))
        return length

    def check_invariants(self) -> None:
        """Recompute all bookkeeping from first principles.

        Raises:
            AssertionError: Something is lost, doubled or beyond its limit.
        """
        for sequence in self.running:
            if sequence.status is not Status.RUNNING:
                raise AssertionError(f"{sequence} is in the running list")
            if not 0 <= sequence.num_cached < sequence.num_tokens:
                raise AssertionError(f"{sequence} has nothing pending")
        for sequence in self.waiting:
            if sequence.status is not Status.WAITING or sequence.row is not None or sequence.num_cached:
                raise AssertionError(f"{sequence} waits, but holds cache")
        if len(self.running) > self._limits.max_batch_size:
            raise AssertionError(f"{len(self.running)} sequences run, the limit is {self._limits.max_batch_size}")
        if len({id(s) for s in (*self.running, *self.waiting)}) != len(self.running) + len(self.waiting):
            raise AssertionError("a sequence is queued twice")
        self._blocks.check_invariants(self.running)
