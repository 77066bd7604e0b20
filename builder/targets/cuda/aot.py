"""Compiles kernels for NVIDIA GPUs on a machine that needs none: Triton's compiler, then ptxas, to cubins.

Equal specs give equal bytes, and the bytes hold no path of the machine: line information is left out. Only one
version of Triton will do, as the way in which a kernel takes its arguments belongs to the version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from llmbuild.builder.targets.cuda.parameters import check_parameters, launch_parameters
from llmbuild.engine.cubin import Cubin, Launch, TensorMap
from llmbuild.engine.kernel_pack import CompiledKernel
from llmbuild.errors import ConfigError, LLMBuildError
from llmbuild.plugins.kernels.spec import KernelSpec

TRITON = "3.6.0"
COMPILER = f"triton {TRITON}"
INSTALL = "pip install 'llmbuild[cuda-build]' (Linux)"


def triton_problem() -> str | None:
    """Return why kernels cannot be compiled with what is installed, or None if they can. Imports nothing."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return f"triton {TRITON} is not installed"
    return None if version == TRITON else f"triton {version} is installed; kernels are compiled with {TRITON} only"


def require_triton() -> None:
    """
    Raises:
        ConfigError: Triton is missing or of another version, or its interpreter is switched on.
    """
    problem = triton_problem()
    if problem is not None:
        raise ConfigError(problem, where="--target cuda", hint=INSTALL)
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"):
        raise ConfigError("with TRITON_INTERPRET kernels cannot be compiled", where="TRITON_INTERPRET", hint="unset it")


def compile_spec(spec: KernelSpec, sm: int) -> Cubin:
    """Compile one kernel for one SM. Takes 0.1 to 1 second, or nothing where the user's cache holds it.

    Raises:
        ConfigError: Triton is missing or of another version.
        LLMBuildError: The kernel does not compile for this SM (the message names both), or takes its arguments in
            another way than derived.
    """
    return compile_with_ptx(spec, sm)[0]


def compile_with_ptx(spec: KernelSpec, sm: int) -> tuple[Cubin, str]:
    """Likewise; return the text too that the code was assembled from."""
    require_triton()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {name: spec.signature.get(name, "constexpr") for name in spec.function.arg_names}
    divisible = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in spec.divisible_by_16}
    language = GluonASTSource if spec.function.is_gluon() else ASTSource
    source = language(fn=spec.function, signature=signature, constexprs=dict(spec.constants), attrs=divisible)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    where = f"kernel {spec.name}, SM {sm}"
    with settings():
        try:
            compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        except Exception as error:  # the compiler's errors share no base class
            raise LLMBuildError(f"a kernel does not compile: {_reason(error)}", where=where) from error
    return _cubin(compiled, spec, sm, where), str(compiled.asm["ptx"])


def compile_all(
    specs: Sequence[KernelSpec], sms: Sequence[int], *, progress: Callable[[int, int, str], None] | None = None
) -> list[CompiledKernel]:
    """Compile each spec for each SM; specs that differ in name or grid alone are compiled once.

    Args:
        progress: Called with (kernels done, kernels in all, name) before each is compiled.

    Raises:
        As `compile_spec`.
    """
    done: dict[Hashable, dict[int, Cubin]] = {}
    distinct = len({spec.key for spec in specs})
    kernels = []
    for spec in specs:
        if spec.key not in done:
            if progress is not None:
                progress(len(done), distinct, spec.name)
            done[spec.key] = {sm: compile_spec(spec, sm) for sm in sms}
        kernels.append(CompiledKernel(spec.name, spec.grid, done[spec.key]))
    return kernels


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Triton's settings for reproducible code, inside the `with` block."""
    from triton import knobs

    with knobs.compilation.scope(), knobs.cache.scope():
        knobs.compilation.disable_line_info = True
        knobs.compilation.store_binary_only = False  # the PTX is compared with the derived parameters
        knobs.cache.dir = str(cache_folder())
        yield


def cache_folder() -> Path:
    """Where compiled kernels are kept between builds."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmbuild" / "triton"


def _cubin(compiled: Any, spec: KernelSpec, sm: int, where: str) -> Cubin:
    made = compiled.metadata
    if made.triton_version != TRITON or made.arch != f"sm{sm}":
        raise LLMBuildError(f"compiled by triton {made.triton_version} for {made.arch}", where=where)
    if made.profile_scratch_size:
        raise LLMBuildError("the kernel was compiled with profiling", where=where)
    maps = _tensor_maps(spec, made.tensordesc_meta or [])
    parameters = launch_parameters(spec.signature, maps)
    check_parameters(parameters, compiled.asm["ptx"], kernel=where)
    launch = Launch(
        sm=sm,
        symbol=made.name,
        shared=made.shared,
        num_warps=made.num_warps,
        num_ctas=made.num_ctas,
        global_scratch=made.global_scratch_size or 0,
        global_scratch_align=made.global_scratch_align or 1,
        pdl=bool(made.launch_pdl),
        cooperative=bool(made.launch_cooperative_grid),
        parameters=parameters,
        tensor_maps=maps,
    )
    return Cubin(launch, compiled.asm["cubin"])


def _tensor_maps(spec: KernelSpec, made: Sequence[dict[str, Any]]) -> tuple[TensorMap, ...]:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    names = [name for name, kind in spec.signature.items() if kind.startswith("tensordesc")]
    if not made:
        return ()
    return tuple(
        TensorMap(
            argument=name,
            element=TMA_DTYPE_DEVICE_TO_HOST[one["elem_type"]],
            element_size=one["elem_size"],
            swizzle=one["swizzle"],
            block=tuple(one["block_size"]),
        )
        for name, one in zip(names, made, strict=True)
    )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
