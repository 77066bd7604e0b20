"""`DeviceSampler`: samples on the GPU what its kernels can, so that tokens and not logits travel to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from llmbuild.engine.launch_plan import KernelOp, Sampling
from llmbuild.runtime.executors.cuda.count_rows import CountRows
from llmbuild.runtime.executors.cuda.driver import Device
from llmbuild.runtime.executors.cuda.sampling_area import SamplingArea
from llmbuild.runtime.executors.cuda.step_program import KernelStep, StepSizes
from llmbuild.runtime.sampler import SampledTokens, TokenLogprobs, not_finite
from llmbuild.runtime.sampling_batch import RowExtras, SamplingBatch

PLAIN = ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition", "streams", "token_indices")
IDLE = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "presence": 0, "frequency": 0, "repetition": 1}
Draw = Literal["greedy", "full", "adjusted"]


class Choice(NamedTuple):
    """How a step is sampled. draw: a list of the plan's. with_logprobs, with_counts: whether those kernels follow."""

    draw: Draw
    with_logprobs: bool
    with_counts: bool


class DeviceSampler:
    """Args:
    bind: Makes a launch of an op of the plan.
    max_rows: Most rows of logits of a step.
    vocab_size: Columns of logits that mean something where a batch does not say so.
    """

    def __init__(
        self,
        sampling: Sampling,
        device: Device,
        area: SamplingArea,
        bind: Callable[[KernelOp], KernelStep],
        *,
        max_rows: int,
        vocab_size: int,
    ) -> None:
        self._device = device
        self._area = area
        self._num_tokens = sampling.num_tokens
        self._vocab_size = vocab_size
        self._most_entries = len(area.array("allowed_ids"))
        self._most_logprobs = area.result_size("logprob_ids") // max_rows - 1
        self._counts = CountRows(max_rows)
        self._host = [device.allocate_host(area.result_bytes("logprobs")) for _ in range(2)]
        self._results = [area.results(memory.bytes) for memory in self._host]
        self._arrived = [device.event() for _ in self._host]
        self._turn = 0
        self._sources = np.zeros_like(area.array("feed_sources"))  # what the GPU holds
        self.steps: dict[str, list[KernelStep]] = {
            name: [bind(op) for op in getattr(sampling, name)]
            for name in ("greedy", "full", "adjusted", "logprobs", "count", "enter", "feed")
        }

    def choose(self, batch: SamplingBatch) -> Choice | None:
        """Return how a batch is sampled; None: not here, since it asks for more than the kernels hold."""
        if (self._vocab_size if batch.num_tokens is None else batch.num_tokens) != self._num_tokens:
            return None
        draw: Draw = "greedy" if batch.all_greedy else "full"
        if batch.extras is None:
            return Choice(draw, False, False)
        extras = [extra for extra in batch.extras if extra is not None]
        if any(extra.logprobs is not None and extra.logprobs > self._most_logprobs for extra in extras):
            return None
        lists = {
            "allowed": sum(len(extra.allowed) for extra in extras if extra.allowed is not None),
            "banned": sum(len(extra.banned) for extra in extras if extra.banned is not None),
            "bias": sum(len(extra.bias[0]) for extra in extras if extra.bias is not None),
        }
        if max(lists.values()) > self._most_entries:
            return None
        count = any(extra.output is not None for extra in extras)
        logprobs = any(extra.logprobs is not None for extra in extras)
        return Choice("adjusted" if count or any(lists.values()) else draw, logprobs, count)

    def write_sources(self, sources: npt.NDArray[np.int32] | None, tokens: int, stream: Any) -> None:
        """Say which tokens of this step's input were sampled by the step before, for the kernels of `steps["feed"]`.

        A decoding batch that stays as it is says the same at every step: only what is new is copied.

        sources: row of the step before for each token, -1 where the host has written the token; None: nowhere.
        tokens: T of the step as it runs, padding included.
        """
        wanted = np.full(tokens, -1, np.int32)
        if sources is not None:
            wanted[: len(sources)] = sources
        if np.array_equal(wanted, self._sources[:tokens]):
            return
        self._sources[:tokens] = wanted
        self._area.turn()
        self._area.array("feed_sources")[:tokens] = wanted
        self._area.send("feed_sources", tokens, stream)
        self._area.sent(stream)

    def write(self, batch: SamplingBatch, choice: Choice, padded: int, stream: Any) -> None:
        """Bring what the kernels read to the GPU: before the step's ops are put into the stream.

        padded: rows that the kernels run over; those beyond the batch are greedy.
        """
        if choice == Choice("greedy", False, False):
            return  # reads nothing but logits
        area, rows = self._area, len(batch.temperature)
        area.turn()
        for name in PLAIN:
            array = area.array(name)
            array[:rows] = getattr(batch, name)
            array[rows:padded] = IDLE.get(name, 0)
        area.array("seeds").reshape(-1, 2)[:rows] = batch.seeds.view(np.int32).reshape(-1, 2)  # lower words first
        area.array("count_rows")[:padded] = -1
        area.array("logprob_counts")[:padded] = -1
        entering: list[tuple[int, RowExtras]] = []
        if batch.extras is not None:
            self._write_extras(batch.extras, choice, padded, entering, stream)
        area.send_rows(stream)
        area.sent(stream)
        for row, extra in entering:
            self._enter(row, extra, stream)

    def finish(self, choice: Choice, sizes: StepSizes, stream: Any, *, drawn: bool) -> int:
        """Put the kernels behind the step's ops into the stream; return what `result` takes.

        drawn: the kernels of `choice.draw` are already there. The result of the step before last is overwritten.
        """
        self._turn = (self._turn + 1) % len(self._host)
        names: list[str] = [] if drawn else [choice.draw]
        names += [
            name for name, wanted in (("logprobs", choice.with_logprobs), ("count", choice.with_counts)) if wanted
        ]
        for name in names:
            for step in self.steps[name]:
                step.run(sizes, stream)
        self._device.download(
            self._host[self._turn].address,
            self._area.state_address,
            self._area.result_bytes("logprobs" if choice.with_logprobs else "status"),
            stream,
        )
        self._device.record(self._arrived[self._turn], stream)
        return self._turn

    def result(self, turn: int, batch: SamplingBatch, choice: Choice) -> SampledTokens:
        """Wait for a step's tokens and return them. turn: what `finish` returned.

        Raises:
            LLMBuildError: A row's logits hold NaN, or nothing but -inf.
        """
        self._device.synchronize_event(self._arrived[turn])
        rows, results = len(batch.temperature), self._results[turn]
        status = results["status"][:rows]
        if status.any():
            raise not_finite(int(np.flatnonzero(status)[0]))
        token_ids = results["token_ids"][:rows].copy()
        if not choice.with_logprobs or batch.extras is None:
            return SampledTokens(token_ids, None)
        logprobs: list[TokenLogprobs | None] = [None] * rows
        width = self._most_logprobs + 1
        ids = results["logprob_ids"].reshape(-1, width)
        values = results["logprobs"].reshape(-1, width)
        ranks = results["ranks"]
        for row, extra in enumerate(batch.extras):
            if extra is not None and extra.logprobs is not None:
                kept = 1 + extra.logprobs
                logprobs[row] = TokenLogprobs(ids[row, :kept].copy(), values[row, :kept].copy(), int(ranks[row]))
        return SampledTokens(token_ids, logprobs)

    def close(self) -> None:
        for memory, event in zip(self._host, self._arrived, strict=True):
            self._device.free_host(memory)
            self._device.free_event(event)

    def _write_extras(
        self,
        extras: Sequence[RowExtras | None],
        choice: Choice,
        padded: int,
        entering: list[tuple[int, RowExtras]],
        stream: Any,
    ) -> None:
        area = self._area
        count_rows, logprob_counts = area.array("count_rows"), area.array("logprob_counts")
        for row, extra in enumerate(extras):
            if extra is None:
                continue
            if extra.logprobs is not None:
                logprob_counts[row] = extra.logprobs
            if extra.output is not None:
                count_rows[row], is_new = self._counts.take(extra.output)
                if is_new:
                    entering.append((int(count_rows[row]), extra))
        if choice.draw != "adjusted":
            return
        self._write_list("allowed", [extra and extra.allowed for extra in extras], padded, stream)
        self._write_list("banned", [extra and extra.banned for extra in extras], padded, stream)
        self._write_list("bias", [extra and extra.bias and extra.bias[0] for extra in extras], padded, stream)
        added = [extra.bias[1] for extra in extras if extra is not None and extra.bias is not None]
        if added:
            values = np.concatenate(added)
            area.array("bias_values")[: len(values)] = values
            area.send("bias_values", len(values), stream)

    def _write_list(self, name: str, rows: list[npt.NDArray[Any] | None], padded: int, stream: Any) -> None:
        """Lay the lists of all rows one after the other; offsets tell where each begins."""
        area = self._area
        lengths = [0 if ids is None else len(ids) for ids in rows]
        offsets = area.array(f"{name}_offsets")
        offsets[0] = 0
        offsets[1 : len(rows) + 1] = np.cumsum(lengths)
        offsets[len(rows) + 1 : padded + 1] = offsets[len(rows)]
        if total := sum(lengths):
            area.array(f"{name}_ids")[:total] = np.concatenate([ids for ids in rows if ids is not None])
            area.send(f"{name}_ids", total, stream)

    def _enter(self, row: int, extra: RowExtras, stream: Any) -> None:
        """Write a sequence's row of counts, in pieces. Waits for each: sequences enter seldom."""
        assert extra.prompt is not None and extra.output is not None
        area, sizes = self._area, StepSizes(tokens=0, sequences=0, rows=0, longest=0)
        ids, most = np.concatenate((extra.prompt, extra.output)), len(self._area.array("entering_ids"))
        for start in range(0, max(len(ids), 1), most):
            piece = ids[start : start + most]
            area.array("entering")[:] = (
                row,
                len(piece),
                min(max(len(extra.prompt) - start, 0), len(piece)),
                start == 0,
            )
            area.array("entering_ids")[: len(piece)] = piece
            area.send("entering", 4, stream)
            area.send("entering_ids", len(piece), stream)
            for step in self.steps["enter"]:
                step.run(sizes, stream)
            self._device.synchronize(stream)
