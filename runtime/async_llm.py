"""`AsyncLLM`: the engine in a thread of its own, for asyncio. Any number of tasks, and of event loops, may share it.

    task ── generate() ──► commands ──► core thread: apply commands, step, step, ...
      ▲                                    │
      └──────────── asyncio.Queue ◄────────┘  (one call into each event loop a step)

Only the core thread touches the EngineCore. A command takes effect before the next step.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmbuild.errors import EngineStoppedError, RequestError
from llmbuild.runtime.admission import Admission, Message, Prompt
from llmbuild.runtime.core import EngineCore
from llmbuild.runtime.executor import Executor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.loading import LoadedEngine, load_engine
from llmbuild.runtime.outputs import RequestOutput
from llmbuild.runtime.request import Request
from llmbuild.runtime.sampling_params import SamplingParams
from llmbuild.runtime.tokenizer import Tokenizer


class AsyncLLM:
    """Loads an engine directory (see `LLM` for the arguments) and serves it until `close`."""

    def __init__(
        self,
        path: str | Path,
        *,
        num_threads: int | None = None,
        kv_cache_blocks: int | None = None,
        kv_memory_fraction: float | None = None,
        device: int | None = None,
    ) -> None:
        self._set_up(
            load_engine(
                path,
                num_threads=num_threads,
                kv_cache_blocks=kv_cache_blocks,
                kv_memory_fraction=kv_memory_fraction,
                device=device,
            )
        )

    @classmethod
    def over(cls, executor: Executor, limits: ServingLimits, tokenizer: Tokenizer | None = None) -> AsyncLLM:
        """Return an AsyncLLM over an executor that is loaded already."""
        llm = cls.__new__(cls)
        llm._set_up(LoadedEngine(executor, limits, tokenizer))
        return llm

    def _set_up(self, loaded: LoadedEngine) -> None:
        warm_up = getattr(loaded.executor, "warm_up", None)
        if warm_up is not None:
            warm_up()  # a server is ready when its first request is as fast as the others
        self.limits = loaded.limits
        self._admission = Admission(loaded.executor, loaded.limits, loaded.tokenizer)
        self._ids = itertools.count()
        self._commands: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        # Guards what follows. Once stopped, the core thread takes no more commands.
        self._lock = threading.Lock()
        self._running_ids: set[str] = set()
        self._stopped: EngineStoppedError | None = None
        core = EngineCore(*loaded)
        self._thread = threading.Thread(target=self._serve, args=(core,), name="llmbuild-core", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises: RequestError: The engine has none."""
        return self._admission.tokenizer

    @property
    def is_running(self) -> bool:
        """False once closed, or after the engine failed."""
        return self._stopped is None

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, yielding an output at each step, cumulative as `LLM.stream` says.

        A consumer that is cancelled, or that closes the iterator, ends its request before the next step.

        Args:
            request_id: For `abort`; None makes one up.

        Raises:
            RequestError: The request is invalid, or one of that id is running.
            EngineStoppedError: The engine failed or was closed, before or meanwhile.
        """
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        request = self._admission.request(name, prompt, params, stream=True)
        mailbox = _Mailbox(asyncio.get_running_loop(), asyncio.Queue())
        self._submit(request, mailbox)
        finished = False
        try:
            while not finished:
                item = await mailbox.items.get()
                if isinstance(item, EngineStoppedError):
                    raise EngineStoppedError(item.what, hint=item.hint) from item.__cause__
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._commands.put(_Abort(name))
            with self._lock:
                self._running_ids.discard(name)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation, yielding as `generate` does."""
        return self.generate(self._admission.chat_prompt(messages, **template_variables), params, request_id)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its consumer gets a last output with finish_reason "abort"."""
        self._commands.put(_Abort(request_id))

    def close(self) -> None:
        """Stop the engine and free it; consumers still waiting get EngineStoppedError. Twice is once."""
        self._commands.put(None)
        self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _submit(self, request: Request, mailbox: _Mailbox) -> None:
        with self._lock:
            if self._stopped is not None:
                raise EngineStoppedError(self._stopped.what, hint=self._stopped.hint) from self._stopped.__cause__
            if request.request_id in self._running_ids:
                raise RequestError(f"a request {request.request_id!r} is already running", hint="use another id")
            self._running_ids.add(request.request_id)
            self._commands.put(_Add(request, mailbox))

    # ---- the core thread ----

    def _serve(self, core: EngineCore) -> None:
        mailboxes: dict[str, _Mailbox] = {}
        reason = EngineStoppedError("the engine was closed", hint="load it again")
        try:
            while self._apply_commands(core, mailboxes):
                if core.has_work:
                    _deliver(core, mailboxes, core.step())
        except Exception as error:  # the end of the thread: every consumer must hear of it, whatever it is
            reason = EngineStoppedError(f"the engine failed: {error}", hint="load it again; the cause is chained")
            reason.__cause__ = error
        finally:
            # Free the engine first: who hears that it stopped may load it again at once.
            try:
                core.close()
            finally:
                self._stop(reason, mailboxes)

    def _apply_commands(self, core: EngineCore, mailboxes: dict[str, _Mailbox]) -> bool:
        """Apply all commands there are, waiting for one when there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not core.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Add):
                mailboxes[command.request.request_id] = command.mailbox
                core.add(command.request)
            else:
                output = core.abort(command.request_id)
                _deliver(core, mailboxes, [] if output is None else [output])

    def _stop(self, reason: EngineStoppedError, mailboxes: dict[str, _Mailbox]) -> None:
        """Take no more commands, and tell everyone who waits."""
        waiting = list(mailboxes.values())
        with self._lock:
            self._stopped = reason
            while not self._commands.empty():
                command = self._commands.get()
                if isinstance(command, _Add):
                    waiting.append(command.mailbox)
        for mailbox in waiting:
            _post(mailbox.loop, [(mailbox, reason)])


class _Mailbox(NamedTuple):
    """Where a consumer waits: the queue belongs to its event loop."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[RequestOutput | EngineStoppedError]


class _Add(NamedTuple):
    request: Request
    mailbox: _Mailbox


class _Abort(NamedTuple):
    request_id: str


def _deliver(core: EngineCore, mailboxes: dict[str, _Mailbox], outputs: list[RequestOutput]) -> None:
    """Send a step's outputs, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, RequestOutput]]] = {}
    for output in outputs:
        mailbox = mailboxes.pop(output.request_id) if output.finished else mailboxes[output.request_id]
        by_loop.setdefault(mailbox.loop, []).append((mailbox, output))
    for loop, items in by_loop.items():
        if not _post(loop, items):
            # The loop is gone, and its consumers with it.
            for _, output in items:
                core.abort(output.request_id)
                mailboxes.pop(output.request_id, None)


def _post(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[_Mailbox, Any]]) -> bool:
    """Put items into mailboxes of a loop from outside it. False when the loop is closed."""

    def put() -> None:
        for mailbox, item in items:
            mailbox.items.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True
