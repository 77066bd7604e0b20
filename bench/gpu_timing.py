"""What the benchmarks of kernels on a GPU share: times inside of a CUDA graph, and compiling ahead in processes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import uninstalled  # noqa: F401
from triton.runtime.jit import MockTensor

from llmbuild.engine.expressions import evaluate
from llmbuild.plugins.kernels.spec import POINTER_TYPES, KernelSpec

COLD_BYTES = 256 << 20  # several times the L2 cache of any card
DTYPES = {kind: getattr(torch, name) for name, kind in POINTER_TYPES.items()}


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def launch(spec: KernelSpec, given: dict[str, Any], sizes: dict[str, int]) -> None:
    """Launch a kernel on those of the arguments that it takes, unless its grid is empty."""
    grid = tuple(evaluate(text, sizes) for text in spec.grid)
    if min(grid) > 0:
        named = {name: given[name] for name in spec.signature} | dict(spec.constants)
        spec.function[grid](**named, num_warps=spec.num_warps, num_stages=spec.num_stages, **spec.options)


def time_us(call: Callable[[int], None], copies: int, *, graph_ms: float = 4.0, replays: int = 7) -> float:
    """Microseconds of one call inside of a graph of about `graph_ms`, the median of replays.

    call(i) works on copy number i: the launches of the graph go round over all of them.
    """
    for copy in range(min(copies, 2)):
        call(copy)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(0)
    end.record()
    torch.cuda.synchronize()
    launches = max(copies, min(64, int(graph_ms / max(begin.elapsed_time(end), 0.01)) + 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            call(index % copies)
    graph.replay()
    times = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def compile_specs(specs: Iterable[KernelSpec]) -> None:
    """Leave kernels in Triton's cache; the run that times them finds them there."""
    for spec in specs:
        arguments = {name: MockTensor(DTYPES[kind]) if kind in DTYPES else 16 for name, kind in spec.signature.items()}
        options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
        spec.function.warmup(**arguments, **dict(spec.constants), **options, grid=(1,))


def in_processes(function: Callable[..., None], work: Iterable[tuple[Any, ...]], workers: int) -> None:
    """Call a function of a module on each tuple of arguments, in so many processes."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_apply, itertools.repeat(function), work))


def _apply(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    function(*arguments)
