"""`Gemms`: the plan's GEMMs through cuBLASLt, each shape with the algorithm that was quickest on this GPU.

An algorithm belongs to a shape and a bucket of rows. It is chosen where it is first needed, outside of captures: from
what was remembered, else among the library's favourites by time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from llmbuild.engine.expressions import evaluate
from llmbuild.engine.launch_plan import GemmOp, Limits, Place
from llmbuild.errors import EngineError, LLMBuildError
from llmbuild.runtime.executors.cuda.buckets import batch_buckets, bucket_of
from llmbuild.runtime.executors.cuda.checks import version_text
from llmbuild.runtime.executors.cuda.cublaslt import CublasLt, Extras, GemmShape, Matmul, find_library, library_version
from llmbuild.runtime.executors.cuda.driver import Device, capture
from llmbuild.runtime.executors.cuda.gemm_memory import GemmMemory, shape_key

CANDIDATES = 6  # algorithms that are timed
FEW_ROWS = 512
# Calls that are timed, of few rows and of more: over all weights of a shape, so that they come from memory.
TIMED_CALLS, TIMED_LONG_CALLS = 16, 4
MOST_READY = 1024  # shapes with numbers of rows whose descriptors are kept


class BoundGemm(NamedTuple):
    """A GEMM and its memory. shape: number of its shape. most_rows: at the plan's limits."""

    shape: int
    x: int
    weight: int
    out: int
    extras: Extras
    most_rows: int


class NoGemms:
    """For plans that leave no GEMM to the library."""

    def add(self, op: GemmOp, address: Callable[[Place], int]) -> Any:
        raise AssertionError("needs_library said that no GEMM is left to the library")

    def prepare(self, gemm: Any, rows: int, stream: Any) -> None:
        """Nothing is ever added."""

    def run(self, gemm: Any, rows: int, stream: Any) -> None:
        """Nothing is ever added."""

    def save(self) -> None:
        """Nothing was chosen."""


class Gemms:
    """A `GemmLibrary`.

    Args:
        workspace, workspace_bytes: Memory on the GPU that GEMMs may use; they run one after the other.
        limits: Of the plan.
        tune: Time candidates; otherwise the library's favourite is taken.
        memory: Choices made before.
    """

    def __init__(
        self,
        device: Device,
        lt: CublasLt,
        workspace: int,
        workspace_bytes: int,
        *,
        limits: Limits,
        tune: bool,
        memory: GemmMemory,
    ) -> None:
        self._device = device
        self._lt = lt
        self._workspace = (workspace, workspace_bytes)
        self._sizes = limits.sizes()
        self._tune = tune
        self._memory = memory
        self._shapes: list[GemmShape] = []
        self._bound: list[list[BoundGemm]] = []  # by index of the shape
        self._algorithms: dict[tuple[int, int], bytes] = {}  # (shape, bucket) ⇒ algorithm
        self._ready: OrderedDict[tuple[int, int], Matmul] = OrderedDict()  # (shape, rows)

    def add(self, op: GemmOp, address: Callable[[Place], int]) -> BoundGemm:
        x, weight, out = address(op.x), address(op.weight), address(op.out)
        optional = (op.bias, op.x_scale, op.weight_scale)
        extras = Extras(*(0 if place is None else address(place) for place in optional))
        shape = GemmShape(
            n=op.n,
            k=op.k,
            batch=op.batch,
            dtype=op.dtype,
            x_stride=op.x_stride,
            x_batch=op.x_batch,
            weight_layout=op.weight_layout,
            weight_stride=op.weight_stride,
            weight_batch=op.weight_batch,
            out_stride=op.out_stride,
            out_batch=op.out_batch,
            has_bias=op.bias is not None,
            align_a=alignment(weight),
            align_b=alignment(x),
            align_d=alignment(out),
            number_dtype=op.number_dtype,
            has_scales=op.x_scale is not None,
        )
        if shape not in self._shapes:
            self._shapes.append(shape)
            self._bound.append([])
        index = self._shapes.index(shape)
        gemm = BoundGemm(index, x, weight, out, extras, evaluate(op.rows, self._sizes))
        self._bound[index].append(gemm)
        return gemm

    def prepare(self, gemm: BoundGemm, rows: int, stream: Any) -> None:
        """Choose the algorithm for so many rows.

        Raises:
            LLMBuildError: The library has none.
        """
        key = (gemm.shape, rows)
        if key in self._ready:
            self._ready.move_to_end(key)
            return
        matmul = Matmul(self._lt, self._shapes[gemm.shape], rows, self._workspace)
        algo = self._algorithm(gemm, rows, stream)
        if not matmul.accepts(algo, gemm.extras):
            algo = self._favourites(matmul, gemm, 1)[0]
        matmul.choose(algo)
        self._ready[key] = matmul
        if len(self._ready) > MOST_READY:
            self._ready.popitem(last=False)[1].close()

    def run(self, gemm: BoundGemm, rows: int, stream: Any) -> None:
        self._ready[gemm.shape, rows].run(gemm.x, gemm.weight, gemm.out, gemm.extras, stream)

    def save(self) -> None:
        """Remember the choices for the next process."""
        self._memory.save()

    def close(self) -> None:
        self._memory.save()
        for matmul in self._ready.values():
            matmul.close()
        self._ready.clear()
        self._lt.close()

    def _algorithm(self, gemm: BoundGemm, rows: int, stream: Any) -> bytes:
        """Return the algorithm of the bucket that `rows` falls into."""
        bucket = row_bucket(rows, gemm.most_rows)
        key = (gemm.shape, bucket)
        if key not in self._algorithms:
            shape = self._shapes[gemm.shape]
            matmul = Matmul(self._lt, shape, bucket, self._workspace)
            try:
                known = self._memory.get(shape_key(shape, bucket))
                if known is None or not matmul.accepts(known, gemm.extras):
                    known = self._choose(matmul, gemm, stream)
                    if self._tune:
                        self._memory.put(shape_key(shape, bucket), known)
            finally:
                matmul.close()
            self._algorithms[key] = known
        return self._algorithms[key]

    def _choose(self, matmul: Matmul, gemm: BoundGemm, stream: Any) -> bytes:
        found = self._favourites(matmul, gemm, CANDIDATES if self._tune else 1)
        if len(found) == 1:
            return found[0]
        gemms = [each for each in self._bound[gemm.shape] if each.most_rows >= matmul.rows]
        times = [self._time(matmul, algo, gemms, stream) for algo in found]
        return found[times.index(min(times))]

    def _favourites(self, matmul: Matmul, gemm: BoundGemm, count: int) -> list[bytes]:
        found = matmul.heuristics(count, gemm.extras)
        if not found:
            shape = self._shapes[gemm.shape]
            raise LLMBuildError(f"cuBLASLt has no algorithm for {shape_key(shape, matmul.rows)}", where="cuBLASLt")
        return found

    def _time(self, matmul: Matmul, algo: bytes, gemms: list[BoundGemm], stream: Any) -> float:
        """Return milliseconds of some calls, in a graph: the host would be slower than small GEMMs.

        Writes their outputs, which hold nothing between steps.
        """
        device = self._device
        matmul.choose(algo)

        def calls(count: int) -> None:
            for number in range(count):
                each = gemms[number % len(gemms)]
                matmul.run(each.x, each.weight, each.out, each.extras, stream)

        try:
            calls(1)  # loads the code: not while capturing
        except LLMBuildError:
            return float("inf")
        timed = TIMED_CALLS if matmul.rows <= FEW_ROWS else TIMED_LONG_CALLS
        graph = capture(device, stream, lambda: calls(timed))
        start, end = device.event(timing=True), device.event(timing=True)
        device.launch_graph(graph, stream)
        device.record(start, stream)
        device.launch_graph(graph, stream)
        device.record(end, stream)
        device.synchronize_event(end)
        elapsed = device.elapsed(start, end)
        device.free_event(start)
        device.free_event(end)
        device.free_graph(graph)
        return elapsed


def row_bucket(rows: int, most: int) -> int:
    """Return the number of rows that an algorithm is chosen for: finely spaced as decode steps are, at most `most`."""
    if rows >= most:
        return rows
    return bucket_of(rows, batch_buckets(most))


def alignment(address: int) -> int:
    """Return the largest power of two that divides an address, at most 256."""
    return min(address & -address, 256) or 256


def open_library(device: Device) -> CublasLt:
    """Open cuBLASLt for this GPU.

    Raises:
        EngineError: It is not installed, or newer than the driver.
    """
    library = find_library()
    version = library_version(library)
    if version // 10000 > device.driver_version // 1000:
        raise EngineError(
            f"the NVIDIA driver is too old: it serves CUDA {version_text(device.driver_version)}, the installed "
            f"cuBLASLt is of CUDA {version // 10000}",
            where=f"GPU {device.ordinal}, {device.name}",
            hint=f"install a driver for CUDA {version // 10000}.0 or newer",
        )
    return CublasLt(library)
