"""The step of `llmbuild selftest` that calls the plugin on a GPU: here on host memory, kernels interpreted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from llmbuild.builder.targets.tensorrt.plugin_kernels import compile_kernels, plugin_program
from llmbuild.runtime.executors.cuda.driver import HostMemory
from llmbuild.selftest import enqueue, steps
from llmbuild.selftest.record import NotHere
from support.interpreted_kernels import InterpretedKernels
from support.plugin_bindings import plugin_module

SM, FEW, STREAM = 90, 2, 7


class HostDevice(InterpretedKernels):
    """A `Device` whose memory is the host's."""

    def __init__(self) -> None:
        super().__init__(SM)
        self.held: set[int] = set()

    def _take(self, memory: torch.Tensor) -> int:
        self.held.add(memory.data_ptr())
        return self.own(memory)

    def allocate(self, num_bytes: int) -> int:
        return self._take(torch.empty(max(16, num_bytes), dtype=torch.uint8))

    def allocate_host(self, num_bytes: int) -> HostMemory:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return HostMemory(self._take(memory), memory.numpy())

    def free(self, address: int) -> None:
        self.held.remove(address)

    def free_host(self, memory: HostMemory) -> None:
        self.held.remove(memory.address)

    def upload(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    download = upload

    def fill(self, target: int, value: int, num_bytes: int, stream: int) -> None:
        ctypes.memset(target, value, num_bytes)

    def stream(self) -> int:
        self.held.add(STREAM)
        return STREAM

    def free_stream(self, stream: int) -> None:
        self.held.remove(stream)

    def synchronize(self, stream: int) -> None:
        """Everything is done at once."""

    def begin_capture(self, stream: int) -> None:
        self._capturing = []

    def end_capture(self, stream: int) -> list[Callable[[], None]]:
        recorded, self._capturing = self._capturing, None
        assert recorded
        return recorded

    def launch_graph(self, graph: list[Callable[[], None]], stream: int) -> None:
        for launch in graph:
            launch()

    def free_graph(self, graph: list[Callable[[], None]]) -> None:
        graph.clear()


def test_every_step_equals_the_reference_also_captured() -> None:
    form, device = enqueue.tiny_form(), HostDevice()
    plugin = plugin_module.PagedAttention.of(form, compile_kernels(form, SM, processors=FEW), device)
    device.know(plugin_program(form, SM, processors=FEW)[1], plugin.opened.pack)
    found, expected = enqueue.all_steps(device, plugin)
    assert found.shape == expected.shape == (2 * 46, 4, 16)
    assert np.abs(expected).max() > 1
    steps.difference(found, expected, steps.ATTENTION_TOLERANCE)
    assert {name: device.launched.count(name) for name in set(device.launched)}["store"] == 8
    assert device.held == set()


def test_without_a_gpu_it_says_why() -> None:
    with pytest.raises(NotHere, match="no GPU: none here"):
        steps.plugin_enqueue("no GPU: none here")
