"""`EngineCore`: the step loop. Schedule, build, execute, collect; nothing here knows the target."""

from __future__ import annotations

import time
from typing import NamedTuple

from llmbuild.errors import RequestError
from llmbuild.runtime.block_manager import BlockManager
from llmbuild.runtime.completion import Completion
from llmbuild.runtime.executor import AsyncExecutor, Executor, PendingTokens
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.outputs import RequestMetrics, RequestOutput
from llmbuild.runtime.request import Request
from llmbuild.runtime.sampler import SampledTokens
from llmbuild.runtime.scheduler import Schedule, Scheduler
from llmbuild.runtime.sequence import Sequence
from llmbuild.runtime.step import StepBuilder
from llmbuild.runtime.tokenizer import Tokenizer


class EngineCore:
    """Serves requests that `make_request` admitted. One thread at a time.

    Args:
        executor: Runs the steps; owns the KV pool.
        limits: What the engine was built for.
        tokenizer: Makes text of tokens; None serves token ids only.
    """

    def __init__(self, executor: Executor, limits: ServingLimits, tokenizer: Tokenizer | None = None) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._blocks = BlockManager(
            executor.num_blocks,
            executor.block_size,
            max_sequences=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
        )
        self._scheduler = Scheduler(limits, self._blocks)
        self._builder = StepBuilder(limits, self._blocks)
        self._active: dict[str, _Active] = {}
        self._completions: dict[Sequence, Completion] = {}
        # Looked at once: asking for a protocol looks at each of its methods.
        self._overlapping = executor if isinstance(executor, AsyncExecutor) else None
        self._flight: tuple[_Samples, PendingTokens] | None = None  # a step that was started and not collected

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._flight is not None

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    def add(self, request: Request) -> None:
        """Queue a request: one sequence for each of its n completions.

        Raises:
            RequestError: A request of that id is being served.
        """
        if request.request_id in self._active:
            raise RequestError(f"a request {request.request_id!r} is already running", hint="use another id")
        completions = [Completion(Sequence(request, index), self._tokenizer) for index in range(request.params.n)]
        self._active[request.request_id] = _Active(request, completions)
        for completion in completions:
            self._completions[completion.sequence] = completion
            self._scheduler.add(completion.sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it stands and free its blocks at once. Return its last output; None if unknown."""
        active = self._active.get(request_id)
        if active is None:
            return None
        for completion in active.completions:
            if completion.sequence in self._completions:
                completion.abort()
                self._retire(active, completion)
        return self._output(active, time.monotonic())

    def step(self) -> list[RequestOutput]:
        """Run one step. Return an output of each request that finished, and of each streaming one that got a token.

        Where the executor can, steps overlap: the outputs are then those of the step before.
        """
        if self._overlapping is not None:
            return self._step_overlapped(self._overlapping)
        schedule = self._scheduler.schedule()
        if schedule.is_empty:
            return []
        step, sampling, sampled = self._builder.build(schedule)
        tokens = self._executor.execute(step, sampling)
        return self._collect(self._advance(schedule, sampled), tokens)

    def _step_overlapped(self, executor: AsyncExecutor) -> list[RequestOutput]:
        """Start a step while the one before still runs, then collect that one.

            device   | step N          | step N + 1              | step N + 2
            host     | prepare N + 1 | collect N | prepare N + 2 | collect N + 1

        What the host does not know yet is fed on the device. A sequence that ends in step N for a reason that only its
        token tells is in step N + 1 too; that token is dropped.
        """
        outputs: list[RequestOutput] = []
        before, self._flight = self._flight, None
        schedule = self._scheduler.schedule()
        built = None if schedule.is_empty else self._builder.build(schedule)
        if built is not None and before is not None and not executor.can_overlap(built[1]):
            outputs, before = self._land(*before), None
            schedule = schedule.without_finished()
            built = None if schedule.is_empty else self._builder.build(schedule)
        if built is not None:
            step, sampling, sampled = built
            pending = executor.execute_async(step, sampling, self._builder.feed)
            self._flight = (self._advance(schedule, sampled), pending)
        return outputs if before is None else self._land(*before)

    def _land(self, samples: _Samples, pending: PendingTokens) -> list[RequestOutput]:
        """Wait for a step that was started, and collect it."""
        return self._collect(samples, pending.result())

    def _advance(self, schedule: Schedule, sampled: list[Sequence]) -> _Samples:
        """Note that a step has been started: its tokens are cached, and its samples have their places."""
        self._scheduler.commit(schedule)
        self._builder.advance()
        positions = [sequence.num_tokens for sequence in sampled]
        for sequence in sampled:
            sequence.append(0)
        return _Samples(sampled, positions)

    def _collect(self, samples: _Samples, tokens: SampledTokens) -> list[RequestOutput]:
        now = time.monotonic()
        logprobs = tokens.logprobs or [None] * len(samples.sequences)
        touched: dict[str, _Active] = {}
        for sequence, position, token, found in zip(
            samples.sequences, samples.positions, tokens.token_ids.tolist(), logprobs, strict=True
        ):
            completion = self._completions.get(sequence)
            if completion is None:  # it ended meanwhile
                continue
            sequence.settle(position, token)
            if sequence.row is not None and sequence.num_tokens == position + 1:
                self._builder.settle(sequence, token)
            request = sequence.request
            active = self._active[request.request_id]
            finished = completion.take(token, found)
            if active.metrics.first_token_s is None:
                active.metrics.first_token_s = now - request.arrival
            if finished:
                self._retire(active, completion)
            if request.stream or not active.unfinished:
                touched[request.request_id] = active
        return [self._output(active, now) for active in touched.values()]

    def _retire(self, active: _Active, completion: Completion) -> None:
        self._scheduler.finish(completion.sequence)
        del self._completions[completion.sequence]
        active.unfinished -= 1
        active.metrics.preemptions += completion.sequence.preemptions
        if not active.unfinished:
            del self._active[active.request.request_id]

    def _output(self, active: _Active, now: float) -> RequestOutput:
        request, finished = active.request, not active.unfinished
        if finished:
            active.metrics.finished_s = now - request.arrival
        return RequestOutput(
            request.request_id,
            request.prompt,
            active.prompt_token_ids,
            [completion.output() for completion in active.completions],
            finished,
            active.metrics,
        )

    def check_invariants(self) -> None:
        """Recompute all bookkeeping from first principles, between steps.

        Raises:
            AssertionError: Something is lost, doubled or stale.
        """
        self._scheduler.check_invariants()
        self._builder.check_invariants(self._scheduler.running)
        queued = {*self._scheduler.running, *self._scheduler.waiting}
        if queued != set(self._completions):
            raise AssertionError("the queues and the completions differ")
        listed = {c.sequence for a in self._active.values() for c in a.completions if c.finish_reason is None}
        if listed != queued:
            raise AssertionError("the active requests and the queues differ")

    def close(self) -> None:
        """Free the executor."""
        self._executor.close()


class _Samples(NamedTuple):
    """Whose tokens a started step samples. positions: of these tokens in their sequences."""

    sequences: list[Sequence]
    positions: list[int]


class _Active:
    """A request being served: its completions, and how many of them are not finished."""

    __slots__ = ("completions", "metrics", "prompt_token_ids", "request", "unfinished")

    def __init__(self, request: Request, completions: list[Completion]) -> None:
        self.request = request
        self.completions = completions
        self.unfinished = len(completions)
        self.metrics = RequestMetrics()
        self.prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
