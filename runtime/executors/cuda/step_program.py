"""`StepProgram`: a plan's ops, bound to memory, ready to be put into a stream for any sizes of a step.

What never changes is done once: kernels loaded, addresses and constant numbers written, constant grids evaluated. A
step writes the numbers that depend on it and launches. The driver copies parameters at each launch, so that one
program serves eager steps and captures alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from llmbuild.cuda.calls import CudaError
from llmbuild.cuda.kernels import Grid
from llmbuild.engine.cubin import Cubin
from llmbuild.engine.expressions import evaluate, parse
from llmbuild.engine.launch_plan import GemmOp, KernelOp, LaunchPlan, Limits, Place, most_bytes
from llmbuild.errors import LLMBuildError
from llmbuild.runtime.executors.cuda.driver import Device
from llmbuild.runtime.executors.cuda.parameters import ParameterBuffer

Kind = Literal["decode", "mixed"]


class StepSizes:
    """The sizes of one step: T tokens, B sequences, L rows of logits, S the longest sequence. Call it with a text."""

    def __init__(self, *, tokens: int, sequences: int, rows: int, longest: int) -> None:
        self.values = {"T": tokens, "B": sequences, "L": rows, "S": longest}
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Return the value of an expression; a text is evaluated once."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = evaluate(text, self.values)
        return found


class GemmLibrary(Protocol):
    """What computes the GEMMs for which a plan names no kernel."""

    def add(self, op: GemmOp, address: Callable[[Place], int]) -> Any:
        """Return the op bound to its memory: for the other methods."""
        ...

    def prepare(self, gemm: Any, rows: int, stream: Any) -> None:
        """Choose how to compute so many rows. Not while a stream is captured."""
        ...

    def run(self, gemm: Any, rows: int, stream: Any) -> None:
        """Put the GEMM into the stream."""
        ...

    def save(self) -> None:
        """Remember the choices for the next process."""
        ...


class LoadedKernel(NamedTuple):
    """cubin: of this GPU. function: the driver's handle. grid: expressions."""

    cubin: Cubin
    function: Any
    grid: tuple[str, str, str]


class KernelStep:
    """One launch of a kernel."""

    def __init__(
        self, op: KernelOp, kernel: LoadedKernel, device: Device, address: Callable[[Place], int], scratch: int
    ) -> None:
        launch = kernel.cubin.launch
        self._parameters = ParameterBuffer(op.kernel, launch, op.arguments, address, scratch)
        self._launcher = device.launcher(kernel.function, launch, self._parameters)
        self._grid = kernel.grid
        varies = any(parse(text).names for text in kernel.grid)
        self._constant = None if varies else Grid(*(evaluate(text, {}) for text in kernel.grid))

    def prepare(self, sizes: StepSizes, stream: Any) -> None:
        """Nothing: a kernel has one form."""

    def run(self, sizes: StepSizes, stream: Any) -> None:
        grid = self._constant
        if grid is None:
            x, y, z = self._grid
            grid = Grid(sizes(x), sizes(y), sizes(z))
        if grid.x <= 0 or grid.y <= 0 or grid.z <= 0:
            return
        if self._parameters.variables:
            self._parameters.update(sizes)
        self._launcher(grid, stream)


class GemmStep:
    """One GEMM: the plan's own kernels where it names some for so few rows, else the library."""

    def __init__(
        self, op: GemmOp, small: Mapping[int, list[KernelStep]], library: GemmLibrary, address: Callable[[Place], int]
    ) -> None:
        self._op = op
        self._small = small  # index in op.kernels ⇒ launches
        self._library = library
        covered = any(each.most_rows is None for each in op.kernels)
        self._gemm = None if covered else library.add(op, address)

    def prepare(self, sizes: StepSizes, stream: Any) -> None:
        rows = sizes(self._op.rows)
        if rows > 0 and self._launches(rows) is None:
            self._library.prepare(self._gemm, rows, stream)

    def run(self, sizes: StepSizes, stream: Any) -> None:
        rows = sizes(self._op.rows)
        if rows <= 0:
            return
        launches = self._launches(rows)
        if launches is None:
            self._library.run(self._gemm, rows, stream)
            return
        for step in launches:
            step.run(sizes, stream)

    def _launches(self, rows: int) -> list[KernelStep] | None:
        for index, small in enumerate(self._op.kernels):
            if small.most_rows is None or rows <= small.most_rows:
                return self._small[index]
        return None


class StepProgram:
    """All ops of a plan.

    Args:
        kernels: Every kernel that the plan names.
        address: Where places lie.
        library: Computes GEMMs.
        wait: Wait for each op, so that a failure names it; not while capturing.

    Raises:
        EngineError: The arguments of an op are not what its kernel takes.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        device: Device,
        kernels: Mapping[str, LoadedKernel],
        address: Callable[[Place], int],
        library: GemmLibrary,
        *,
        wait: bool = False,
    ) -> None:
        self._wait = wait
        self._device = device
        self._kernels = kernels
        self._address = address
        self._limits = plan.limits
        self._scratch: list[int] = []
        steps: list[KernelStep | GemmStep] = []
        for op in plan.ops:
            if isinstance(op, KernelOp):
                steps.append(self.kernel_step(op))
            else:
                small = {i: [self.kernel_step(one) for one in s.launches] for i, s in enumerate(op.kernels)}
                steps.append(GemmStep(op, small, library, address))
        bound = list(zip(plan.ops, steps, strict=True))
        self._steps: dict[Kind, list[KernelStep | GemmStep]] = {
            "decode": [step for op, step in bound if op.when != "mixed"],
            "mixed": [step for op, step in bound if op.when != "decode"],
        }
        self._names = {id(step): f"op {number}, {name_of(op)}" for number, (op, step) in enumerate(bound)}

    def prepare(self, kind: Kind, sizes: StepSizes, stream: Any) -> None:
        """Make all choices that `run` of these sizes needs; may run GEMMs to time them. Not while capturing."""
        for step in self._steps[kind]:
            step.prepare(sizes, stream)

    def run(self, kind: Kind, sizes: StepSizes, stream: Any) -> None:
        """Put the ops of this kind of step into the stream, in order."""
        for step in self._steps[kind]:
            step.run(sizes, stream)
            if self._wait:
                self._await(step, sizes, stream)

    def _await(self, step: KernelStep | GemmStep, sizes: StepSizes, stream: Any) -> None:
        try:
            self._device.synchronize(stream)
        except CudaError as error:
            raise LLMBuildError(f"{self._names[id(step)]} failed: {error.what}", where=str(sizes.values)) from error

    def close(self) -> None:
        for address in self._scratch:
            self._device.free(address)
        self._scratch.clear()

    def kernel_step(self, op: KernelOp) -> KernelStep:
        """Return a launch bound to its memory."""
        kernel = self._kernels[op.kernel]
        scratch = 0
        if kernel.cubin.launch.global_scratch:
            # Memory of its own: kernels of one stream may overlap.
            scratch = self._device.allocate(scratch_bytes(kernel, self._limits))
            self._scratch.append(scratch)
        return KernelStep(op, kernel, self._device, self._address, scratch)


def name_of(op: KernelOp | GemmOp) -> str:
    """Return what people call an op: its kernel, or the library, and the nodes that it computes."""
    return f"{op.kernel if isinstance(op, KernelOp) else 'GEMM'} ({op.label})"


def scratch_bytes(kernel: LoadedKernel, limits: Limits) -> int:
    """Return how much scratch memory the largest launch of a kernel within the limits needs."""
    launch = kernel.cubin.launch
    x, y, z = kernel.grid
    return most_bytes(f"({x}) * ({y}) * ({z})", limits) * launch.num_ctas * launch.global_scratch
