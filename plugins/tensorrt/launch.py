"""A node's program on a GPU: kernels loaded into a context, launched with the addresses that TensorRT gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from llmbuild.cuda.calls import checked, compute_capability, device_attribute, device_name, import_driver
from llmbuild.cuda.kernels import Grid, Kernels
from llmbuild.engine.cubin import Cubin, Launch, Parameter
from llmbuild.engine.expressions import evaluate
from llmbuild.engine.launch_plan import KernelOp, Number
from llmbuild.errors import EngineError
from llmbuild.plugins.tensorrt.bindings import INSTALL
from llmbuild.plugins.tensorrt.program import AGAIN, Opened

USER = "the TensorRT plugin PagedAttention"


class Loader(Protocol):
    """What `llmbuild.cuda.kernels.Kernels` does, for one context. sm: compute capability of its GPU."""

    sm: int

    def load(self, cubin: Cubin) -> Any: ...

    def launcher(self, kernel: Any, launch: Launch, parameters: Any) -> Callable[[Grid, Any], None]: ...


class ContextKernels(Kernels):
    """The kernels of a context that others made and keep: TensorRT's caller."""

    def __init__(self, driver: Any, device: Any) -> None:
        shared = device_attribute(driver, device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        super().__init__(driver, shared, device_name(driver, device))
        self.sm = compute_capability(driver, device)


_CONTEXTS: dict[int, ContextKernels] = {}


def current_kernels() -> Loader:
    """Return the kernels of the calling thread's context; all layers of an engine share them.

    Raises:
        EngineError: cuda-bindings is missing, or the thread has no context.
        CudaError: The driver refuses.
    """
    driver = import_driver(USER, INSTALL)
    context = checked(driver, "cuCtxGetCurrent", driver.cuCtxGetCurrent())
    if not int(context):
        raise EngineError(f"{USER} was asked to run in a thread without a CUDA context", hint="set the device first")
    if int(context) not in _CONTEXTS:
        device = checked(driver, "cuCtxGetDevice", driver.cuCtxGetDevice())
        _CONTEXTS[int(context)] = ContextKernels(driver, device)
    return _CONTEXTS[int(context)]


class Parameters:
    """The parameters of one launch, written before each. pointers: address of the array of addresses of each."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.data = np.zeros(max((p.offset + p.size for p in launch.parameters), default=1), np.uint8)
        base = self.data.ctypes.data
        self._pointers = np.array([base + p.offset for p in launch.parameters], np.uint64)
        self.pointers: int = self._pointers.ctypes.data
        self._taken = [p for p in launch.parameters if p.kind != "scratch"]

    @property
    def taken(self) -> list[Parameter]:
        """Those that arguments are passed for: all but the scratch pointers, which are null."""
        return self._taken

    def write(self, values: list[int]) -> None:
        for parameter, value in zip(self._taken, values, strict=True):
            signed = parameter.kind.startswith("i")
            end = parameter.offset + parameter.size
            self.data.data[parameter.offset : end] = value.to_bytes(parameter.size, "little", signed=signed)


class Step(NamedTuple):
    op: KernelOp
    grid: tuple[str, str, str]
    parameters: Parameters
    launch: Callable[[Grid, Any], None]


class LoadedProgram:
    """A program whose kernels lie on a GPU.

    Raises:
        EngineError: The kernels are for another GPU, or take what no node has.
        CudaError: The driver cannot load them.
    """

    def __init__(self, opened: Opened, loader: Loader, where: str) -> None:
        if opened.sm != loader.sm:
            raise EngineError(
                f"the engine's attention kernels are for SM {opened.sm}, this GPU is SM {loader.sm}",
                where=where,
                hint=f"convert the model again with --sm {loader.sm}",
            )
        self._program = opened.program
        self._steps = []
        for op in opened.program.ops:
            cubin = opened.pack.kernel(op.kernel, opened.sm)
            parameters = Parameters(cubin.launch)
            _check(op, cubin.launch, parameters, where)
            launch = loader.launcher(loader.load(cubin), cubin.launch, parameters)
            self._steps.append(Step(op, opened.pack.grid(op.kernel), parameters, launch))

    def run(self, addresses: Mapping[str, int], workspace: int, tokens: int, sequences: int, stream: Any) -> None:
        """Put a step into the stream: nothing is allocated, copied or waited for, so that it can be captured.

        Args:
            addresses: Of the node's inputs, and of its output "out".
            workspace: Of at least as many bytes as the program asks for; may be 0 where it asks for none.
        """
        sizes = {"T": tokens, "B": sequences}
        kind = "decode" if tokens == sequences else "mixed"
        offsets, _ = self._program.scratch_layout(tokens, sequences)
        for step in self._steps:
            if step.op.when not in ("always", kind):
                continue
            grid = Grid(*(evaluate(text, sizes) for text in step.grid))
            if min(grid) <= 0:
                continue
            values = []
            for argument in step.op.arguments:
                if isinstance(argument, Number):
                    values.append(evaluate(argument.value, sizes))
                elif argument.kind == "buffer":
                    values.append(workspace + offsets[argument.name] + argument.offset)
                else:
                    values.append(addresses[argument.name] + argument.offset)
            step.parameters.write(values)
            step.launch(grid, stream)


def _check(op: KernelOp, launch: Launch, parameters: Parameters, where: str) -> None:
    if launch.global_scratch or launch.tensor_maps:
        raise EngineError(f"the kernel {op.kernel} needs memory that no plugin has", where=where, hint=AGAIN)
    if [p.kind.startswith("*") for p in parameters.taken] != [not isinstance(a, Number) for a in op.arguments]:
        raise EngineError(f"the kernel {op.kernel} takes other arguments than the program gives", where=where)
