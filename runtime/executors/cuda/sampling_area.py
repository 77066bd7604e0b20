"""`SamplingArea`: the arrays of the sampling kernels: what the host writes, and what stays on the GPU.

    inputs  | temperature | top_k | ... [L] | allowed_ids | bias_ids | ...      one copy of the front, one of a list
    state   | token_ids | status | ranks | logprob_ids | logprobs | counts      zeros at first; the results lie in front

Names are short here: a plan's name without the prefix that all of its arrays share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from llmbuild.engine.expressions import evaluate, parse
from llmbuild.engine.launch_plan import ALIGNMENT, ITEM_BYTES, Input, LaunchPlan, Sampling
from llmbuild.runtime.executors.cuda.driver import Device
from llmbuild.runtime.executors.cuda.inputs import NUMPY


class SamplingArea:
    """Host arrays take turns, as those of a step's inputs do: `turn` before a step's are written."""

    def __init__(self, plan: LaunchPlan, sampling: Sampling, device: Device, stream: Any) -> None:
        self._device = device
        self._prefix = prefix_of(sampling)
        inputs, state = ordered_inputs(sampling), ordered_state(sampling)
        self._sizes = {each.name: each for each in (*inputs, *state)}
        self._limits = plan.limits.sizes()
        self._offsets, self._input_bytes = packed(inputs, self._limits)
        self._state_offsets, self._state_bytes = packed(state, self._limits)
        self._front = max((self._end(each.name) for each in inputs if _by_row(each)), default=0)
        self._inputs = device.allocate(self._input_bytes)
        self._state = device.allocate(self._state_bytes)
        device.fill(self._inputs, 0, self._input_bytes, stream)
        device.fill(self._state, 0, self._state_bytes, stream)
        self.addresses = {name: self._inputs + offset for name, offset in self._offsets.items()}
        self.state_addresses = {name: self._state + offset for name, offset in self._state_offsets.items()}
        self._host = [device.allocate_host(self._input_bytes) for _ in range(2)]
        for memory in self._host:
            memory.bytes[:] = 0
        self._sent = [device.event() for _ in self._host]
        self._arrays = [self._views(memory.bytes, self._offsets) for memory in self._host]
        self._turn = 0

    def turn(self) -> None:
        """Take the other host arrays, once their last copies are done."""
        self._turn = (self._turn + 1) % len(self._host)
        self._device.synchronize_event(self._sent[self._turn])

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return the host's array of an input, at its full size."""
        return self._arrays[self._turn][name]

    def send_rows(self, stream: Any) -> None:
        """Put one copy of all arrays that have an entry for each row into the stream."""
        self._device.upload(self._inputs, self._host[self._turn].address, self._front, stream)

    def send(self, name: str, count: int, stream: Any) -> None:
        """Put the copy of the first `count` elements of an array into the stream."""
        full = self._full(name)
        offset, size = self._offsets[full], count * ITEM_BYTES[self._sizes[full].dtype]
        if size:
            self._device.upload(self._inputs + offset, self._host[self._turn].address + offset, size, stream)

    def sent(self, stream: Any) -> None:
        """No more copies of this turn follow."""
        self._device.record(self._sent[self._turn], stream)

    def result_size(self, name: str) -> int:
        """Return the elements of an array of the state."""
        return evaluate(self._sizes[self._full(name)].size, self._limits)

    def result_bytes(self, name: str) -> int:
        """Return how many bytes of the state, from its start, hold all results up to that of `name`."""
        full = self._full(name)
        return self._state_offsets[full] + self.result_size(name) * ITEM_BYTES[self._sizes[full].dtype]

    def results(self, held: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the results, at their full sizes, in a copy of the start of the state."""
        inside = {name: at for name, at in self._state_offsets.items() if at < len(held)}
        return self._views(held, inside)

    @property
    def state_address(self) -> int:
        return self._state

    def close(self) -> None:
        for memory, event in zip(self._host, self._sent, strict=True):
            self._device.free_host(memory)
            self._device.free_event(event)
        self._device.free(self._inputs)
        self._device.free(self._state)

    def _views(self, memory: npt.NDArray[np.uint8], offsets: dict[str, int]) -> dict[str, npt.NDArray[Any]]:
        """Return typed views of memory by short name."""
        views = {}
        for full, offset in offsets.items():
            dtype = np.dtype(NUMPY[self._sizes[full].dtype])
            size = evaluate(self._sizes[full].size, self._limits) * dtype.itemsize
            views[full.removeprefix(self._prefix)] = memory[offset : offset + size].view(dtype)
        return views

    def _full(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _end(self, full: str) -> int:
        each = self._sizes[full]
        return self._offsets[full] + evaluate(each.size, self._limits) * ITEM_BYTES[each.dtype]


def prefix_of(sampling: Sampling) -> str:
    """Return what the names of all arrays begin with: "sample_" for "sample_token_ids"."""
    return sampling.token_ids.name.removesuffix("token_ids")


def ordered_inputs(sampling: Sampling) -> list[Input]:
    """Those with an entry for each row come first, so that one copy brings them."""
    return sorted(sampling.inputs, key=lambda each: not _by_row(each))


def ordered_state(sampling: Sampling) -> list[Input]:
    """Results come first, those of every step before those of logprobs, so that one copy brings what is wanted."""
    places = (sampling.token_ids, sampling.status, sampling.ranks, sampling.logprob_ids, sampling.logprob_values)
    rank = {place.name: number for number, place in enumerate(places)}
    return sorted(sampling.state, key=lambda each: rank.get(each.name, len(rank)))


def packed(arrays: Iterable[Input], sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return (offset by name, bytes in all), one after the other at multiples of 256."""
    offsets, end = {}, 0
    for each in arrays:
        offsets[each.name] = end
        end += -(-evaluate(each.size, sizes) * ITEM_BYTES[each.dtype] // ALIGNMENT) * ALIGNMENT
    return offsets, end


def sampling_bytes(plan: LaunchPlan) -> int:
    """Return the bytes on the GPU that sampling needs."""
    if plan.sampling is None:
        return 0
    sizes = plan.limits.sizes()
    return packed(plan.sampling.inputs, sizes)[1] + packed(plan.sampling.state, sizes)[1]


def _by_row(each: Input) -> bool:
    return "L" in parse(each.size).names
