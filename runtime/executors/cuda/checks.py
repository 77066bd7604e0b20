"""Whether this machine can run an engine of the cuda target, asked before its weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmbuild.cuda.calls import CudaError
from llmbuild.engine.kernel_pack import KernelPack
from llmbuild.engine.launch_plan import GemmOp, LaunchPlan, launches_of
from llmbuild.errors import EngineError
from llmbuild.runtime.executors.cuda.driver import Device
from llmbuild.runtime.executors.cuda.parameters import check_arguments
from llmbuild.runtime.executors.cuda.step_program import LoadedKernel

OLDEST_CUDA = 12000  # that runs what the kernels' compiler writes; 1000 * major + 10 * minor
OLDEST_CUDA_SM100 = 12080


def check_gpu(device: Device, sms: Sequence[int], engine: Path) -> None:
    """
    Args:
        sms: Compute capabilities that the engine was built for.

    Raises:
        EngineError: The GPU is none of them, or its driver is older than the CUDA that kernels are compiled with.
    """
    if device.sm not in sms:
        held = ", ".join(map(str, sms))
        raise EngineError(
            f"the engine holds no kernels for this GPU (SM {device.sm}); it was built for SM {held}",
            where=f"{engine}, GPU {device.ordinal}: {device.name}",
            hint=f"convert the model again with --sm {','.join(map(str, sorted({*sms, device.sm})))}",
        )
    oldest = OLDEST_CUDA_SM100 if device.sm >= 100 else OLDEST_CUDA
    if device.driver_version < oldest:
        raise EngineError(
            f"the NVIDIA driver is too old: it serves CUDA {version_text(device.driver_version)}, the engine's kernels "
            f"need {version_text(oldest)}",
            where=f"GPU {device.ordinal}, {device.name}",
            hint=f"install a driver for CUDA {version_text(oldest)} or newer",
        )


def version_text(number: int) -> str:
    """Return "13.0" for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def load_kernels(plan: LaunchPlan, pack: KernelPack, device: Device) -> dict[str, LoadedKernel]:
    """Load every kernel that a plan names, after checking that all are there and take what the plan gives them.

    Raises:
        EngineError: The pack lacks this GPU's SM or a kernel, a kernel takes other arguments, or the driver cannot
            load one.
    """
    launches = [launch for op in plan.ops for launch in launches_of(op)]
    launches += plan.sampling.ops() if plan.sampling is not None else ()
    cubins = {name: pack.kernel(name, device.sm) for name in sorted({launch.kernel for launch in launches})}
    for launch in launches:
        check_arguments(launch.kernel, cubins[launch.kernel].launch, launch.arguments)
    loaded = {}
    for name, cubin in cubins.items():
        try:
            loaded[name] = LoadedKernel(cubin, device.load(cubin), pack.grid(name))
        except CudaError as error:
            raise _cannot_load(name, pack.path, device, error) from error
    return loaded


def needs_library(plan: LaunchPlan) -> bool:
    """Whether some GEMM of the plan is left to cuBLASLt."""
    gemms = [op for op in plan.ops if isinstance(op, GemmOp)]
    return any(all(small.most_rows is not None for small in gemm.kernels) for gemm in gemms)


def _cannot_load(name: str, path: Path | str, device: Device, error: CudaError) -> EngineError:
    return EngineError(
        f"the driver cannot load the kernel {name}: {error.what}",
        where=f"{path}, GPU {device.ordinal}: {device.name}, CUDA {version_text(device.driver_version)}",
        hint="install a newer NVIDIA driver, or convert the model again with this version of llmbuild",
    )
