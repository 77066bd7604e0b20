"""Kernels "loaded" into Triton's interpreter: what a plugin launches runs on host memory, from addresses alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmbuild.cuda.kernels import Grid
from llmbuild.engine.cubin import Cubin, Launch
from llmbuild.plugins.kernels.interpreter import interpret
from llmbuild.plugins.kernels.spec import POINTER_TYPES, KernelSpec

DTYPES = {pointer: getattr(torch, name) for name, pointer in POINTER_TYPES.items()}


class InterpretedKernels:
    """A `Loader`. sm: of the GPU that it stands for.

    Kernels are known by their code, so that what is launched is what the pack holds under that name.
    """

    def __init__(self, sm: int) -> None:
        self.sm = sm
        self.launched: list[str] = []
        self._specs: dict[bytes, KernelSpec] = {}
        self._memory: list[Tensor] = []
        self._capturing: list[Callable[[], None]] | None = None

    def know(self, specs: Sequence[KernelSpec], pack: Any) -> None:
        """Learn which code of a pack was compiled from which spec."""
        for spec in specs:
            self._specs[bytes(pack.kernel(spec.name, self.sm).data)] = spec

    def own(self, tensor: Tensor) -> int:
        """Let kernels reach a tensor's memory; return its address."""
        assert tensor.is_contiguous()
        self._memory.append(tensor)
        return tensor.data_ptr()

    def load(self, cubin: Cubin) -> KernelSpec:
        return self._specs[bytes(cubin.data)]

    def launcher(self, kernel: KernelSpec, launch: Launch, parameters: Any) -> Callable[[Grid, Any], None]:
        def run(grid: Grid, stream: Any) -> None:
            given = parameters.data.tobytes()  # copied at the launch, as the driver does
            if self._capturing is None:
                self._run(kernel, launch, given, grid)
            else:
                self._capturing.append(lambda: self._run(kernel, launch, given, grid))

        return run

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` launches; return what launches it all."""
        self._capturing = []
        work()
        recorded, self._capturing = self._capturing, None

        def replay() -> None:
            for each in recorded:
                each()

        return replay

    def _run(self, spec: KernelSpec, launch: Launch, given: bytes, grid: Grid) -> None:
        self.launched.append(spec.name)
        taken = [parameter for parameter in launch.parameters if parameter.kind != "scratch"]
        values: dict[str, Any] = dict(spec.constants)
        for (name, kind), parameter in zip(spec.signature.items(), taken, strict=True):
            number = int.from_bytes(given[parameter.offset : parameter.offset + parameter.size], "little")
            if kind.startswith("*"):
                assert number % 16 == 0, f"{name} is not aligned as promised"
                values[name] = self._tensor(number, DTYPES[kind])
            else:
                values[name] = number
        interpret(spec.function)[tuple(grid)](**values)

    def _tensor(self, address: int, dtype: torch.dtype) -> Tensor:
        """Everything from an address to the end of what it lies in."""
        for tensor in self._memory:
            end = tensor.data_ptr() + tensor.nbytes
            if tensor.data_ptr() <= address < end:
                size = (end - address) // dtype.itemsize * dtype.itemsize
                memory = (ctypes.c_uint8 * size).from_address(address)
                return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        raise AssertionError(f"{address:#x} lies in no tensor")
