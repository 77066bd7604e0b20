"""`EngineCore`: the step loop. Schedule, build, execute, collect; nothing here knows the target."""

from __future__ import annotations

import time

from llmbuild.errors import RequestError
from llmbuild.runtime.block_manager import BlockManager
from llmbuild.runtime.completion import Completion
from llmbuild.runtime.executor import Executor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.outputs import RequestMetrics, RequestOutput
from llmbuild.runtime.request import Request
from llmbuild.runtime.sampler import SampledTokens
from llmbuild.runtime.scheduler import Scheduler
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

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

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

        The overlapped loop belongs beside this method, as its twin: schedule and build step N + 1 while the device
        runs step N, with the sampled tokens fed back on the device, and collect one step late. Both must give the
        same tokens.
        """
        schedule = self._scheduler.schedule()
        if schedule.is_empty:
            return []
        step, sampling, sampled = self._builder.build(schedule)
        tokens = self._executor.execute(step, sampling)
        self._scheduler.commit(schedule)
        self._builder.advance(tokens.token_ids)
        return self._collect(sampled, tokens)

    def _collect(self, sampled: list[Sequence], tokens: SampledTokens) -> list[RequestOutput]:
        now = time.monotonic()
        logprobs = tokens.logprobs or [None] * len(sampled)
        touched: dict[str, _Active] = {}
        for sequence, token, found in zip(sampled, tokens.token_ids.tolist(), logprobs, strict=True):
            request, completion = sequence.request, self._completions[sequence]
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


class _Active:
    """A request being served: its completions, and how many of them are not finished."""

    __slots__ = ("completions", "metrics", "prompt_token_ids", "request", "unfinished")

    def __init__(self, request: Request, completions: list[Completion]) -> None:
        self.request = request
        self.completions = completions
        self.unfinished = len(completions)
        self.metrics = RequestMetrics()
        self.prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
