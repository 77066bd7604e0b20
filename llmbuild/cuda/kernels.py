"""Compiled kernels in the current context of the CUDA driver: loaded once, launched with a buffer of parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from llmbuild.cuda.calls import checked
from llmbuild.engine.cubin import Cubin, Launch
from llmbuild.errors import EngineError


class Grid(NamedTuple):
    """Programs along each axis."""

    x: int
    y: int
    z: int

    @property
    def programs(self) -> int:
        return self.x * self.y * self.z


class Kernels:
    """The kernels that were loaded in one context.

    Args:
        driver: `cuda.bindings.driver`.
        shared_limit: Bytes of shared memory that a block can ask for.
        gpu: What the GPU is called, for messages.
    """

    def __init__(self, driver: Any, shared_limit: int, gpu: str) -> None:
        self._driver = driver
        self._shared_limit = shared_limit
        self._gpu = gpu
        self._libraries: list[Any] = []
        self._functions: dict[tuple[str, bytes], Any] = {}

    def load(self, cubin: Cubin) -> Any:
        """Return the kernel of a cubin, ready to launch. The same code is loaded once.

        Raises:
            CudaError: The driver cannot load it.
            EngineError: It needs more shared memory than this GPU has.
        """
        launch, data = cubin.launch, bytes(cubin.data)
        if launch.shared > self._shared_limit:
            raise EngineError(
                f"the kernel {launch.symbol} needs {launch.shared} bytes of shared memory for a block; "
                f"{self._gpu} has {self._shared_limit}",
                hint="convert the model again for this GPU, see --sm",
            )
        known = self._functions.get((launch.symbol, data))
        if known is not None:
            return known
        image = np.frombuffer(data, np.uint8)
        library = self._call("cuLibraryLoadData", image.ctypes.data, [], [], 0, [], [], 0)  # the driver keeps a copy
        self._libraries.append(library)
        kernel = self._call("cuLibraryGetKernel", library, launch.symbol.encode())
        # A function of this context: loads the code now, not in the middle of a capture.
        function = self._call("cuKernelGetFunction", kernel)
        most = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if launch.shared > 48 << 10:
            self._call("cuFuncSetAttribute", function, most, launch.shared)
        self._functions[launch.symbol, data] = function
        return function

    def launcher(self, kernel: Any, launch: Launch, parameters: Any) -> KernelLauncher:
        """Return what launches `kernel` with `parameters`: anything whose `pointers` is the address of an array of the
        addresses of each parameter."""
        return KernelLauncher(self._driver, kernel, launch, parameters)

    def unload(self) -> None:
        for library in self._libraries:
            self._call("cuLibraryUnload", library)
        self._libraries.clear()
        self._functions.clear()

    def _call(self, name: str, *arguments: Any) -> Any:
        return checked(self._driver, name, getattr(self._driver, name)(*arguments))


class KernelLauncher:
    """Launches one kernel with one parameter buffer, whose content at the time of a call counts. About 4 us a call."""

    def __init__(self, driver: Any, kernel: Any, launch: Launch, parameters: Any) -> None:
        self._driver = driver
        self._kernel = kernel
        self._parameters = parameters  # kept: the driver reads it at each call
        self._pointers = int(parameters.pointers)
        self._num_ctas = launch.num_ctas
        self._config = config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * launch.num_warps, 1, 1
        config.sharedMemBytes = launch.shared
        attributes = _launch_attributes(driver, launch)
        config.attrs = attributes
        config.numAttrs = len(attributes)

    def __call__(self, grid: Grid, stream: Any) -> None:
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid.x * self._num_ctas, grid.y, grid.z
        config.hStream = stream
        result = self._driver.cuLaunchKernelEx(config, self._kernel, self._pointers, 0)
        if result[0]:
            checked(self._driver, "cuLaunchKernelEx", result)


def _launch_attributes(driver: Any, launch: Launch) -> list[Any]:
    kinds = driver.CUlaunchAttributeID
    attributes = []

    def attribute(kind: Any) -> Any:
        one = driver.CUlaunchAttribute()
        one.id = kind
        attributes.append(one)
        return one.value

    if launch.pdl:
        value = attribute(kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        value.programmaticStreamSerializationAllowed = 1
    if launch.cooperative:
        attribute(kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1
    if launch.num_ctas > 1:
        cluster = attribute(kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
        cluster.x, cluster.y, cluster.z = launch.num_ctas, 1, 1
    return attributes
