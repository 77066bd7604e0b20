"""The kernels of PagedStore and PagedAttend: compiled to PTX that has TensorRT's parameters and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmbuild.builder.targets.cuda.aot import compile_with_ptx
from llmbuild.builder.targets.cuda.parameters import ENTRY, check_parameters
from llmbuild.engine.cubin import Launch
from llmbuild.errors import ConfigError, LLMBuildError
from llmbuild.plugins.kernels.spec import KernelSpec
from llmbuild.plugins.kernels.stored_attention import stored_attend_specs, stored_store_spec
from llmbuild.plugins.tensorrt.form import PluginForm
from llmbuild.plugins.tensorrt.stored import MOST_SHARED, StoredKernel


def compile_stored(form: PluginForm, sm: int) -> StoredKernel:
    """Compile the kernel of a node for GPUs of one compute capability (90 for 9.0). Needs no GPU.

    TensorRT's documents speak of PTX alone as the form of a stored kernel, and nowhere of more shared memory than a
    kernel gets unasked.

    Raises:
        ConfigError: No tiling is small enough.
        LLMBuildError: As `aot.compile_spec`, or the kernel needs more at its launch than TensorRT gives.
    """
    for spec in specs_of(form, sm):
        cubin, ptx = compile_with_ptx(spec, sm)
        if cubin.launch.shared <= MOST_SHARED:
            return stored_kernel(form, spec, cubin.launch, ptx)
    raise ConfigError(
        f"its kernel needs more than {MOST_SHARED >> 10} KiB of shared memory, which stored kernels do not get",
        where=form.where,
        hint="leave the builder option attention=stored out",
    )


def specs_of(form: PluginForm, sm: int) -> Iterator[KernelSpec]:
    """Yield what may be compiled for a node, best first."""
    if form.role == "store":
        yield stored_store_spec(form.shape)
    else:
        yield from stored_attend_specs(form.shape, sm, form.table_stride)


def numbers_of(form: PluginForm) -> tuple[str, ...]:
    """Return what is passed between the pointers."""
    return () if form.role == "store" else ("B",)


def stored_kernel(form: PluginForm, spec: KernelSpec, launch: Launch, ptx: str) -> StoredKernel:
    """Return a compiled kernel as TensorRT launches it; for the errors see `compile_stored`."""
    if launch.num_ctas != 1 or launch.global_scratch or launch.tensor_maps or launch.pdl or launch.cooperative:
        raise LLMBuildError("its kernel needs more than grid, block and shared memory", where=form.where)
    expected = "p" * len(form.inputs) + "n" * len(numbers_of(form)) + "p" * len(form.outputs)
    if "".join("p" if kind.startswith("*") else "n" for kind in spec.signature.values()) != expected:
        raise LLMBuildError("its kernel takes other arguments than the node has tensors", where=form.where)
    scratch = [at for at, parameter in enumerate(launch.parameters) if parameter.kind == "scratch"]
    bare = without_parameters(ptx, scratch, form.where)
    check_parameters([p for p in launch.parameters if p.kind != "scratch"], bare, kernel=form.where)
    return StoredKernel(
        symbol=launch.symbol,
        ptx=bare,
        grid=spec.grid,
        numbers=numbers_of(form),
        threads=32 * launch.num_warps,
        shared=launch.shared,
    )


def without_parameters(ptx: str, dropped: Sequence[int], where: str) -> str:
    """Return the text of a kernel without some of its parameters, by number: those that Triton adds and it never reads.

    Raises:
        LLMBuildError: It reads one.
    """
    entry = ENTRY.search(ptx)
    if entry is None:
        raise LLMBuildError("there is no kernel in its PTX", where=where)
    declared = entry[2].split(",")
    names = [declared[at].split()[-1] for at in dropped]
    kept = ",".join(text for at, text in enumerate(declared) if at not in dropped)
    head, body = ptx[: entry.start(2)], ptx[entry.end(2) :]
    # A parameter is read by its name, which ends at a bracket or at an offset.
    if used := [name for name in names if f"[{name}]" in body or f"[{name}+" in body or f" {name};" in body]:
        raise LLMBuildError(f"its kernel reads {', '.join(used)}, which TensorRT does not pass", where=where)
    return f"{head}{kept.rstrip()}\n{body}"
