"""Generated Triton source as functions that Triton accepts: it reads the text of a function back from its file."""

from __future__ import annotations

import hashlib
import linecache
from typing import Any

from llmbuild.builder.targets.cuda.partition import Partition
from llmbuild.plugins.kernels.spec import POINTER_TYPES, KernelSpec, pointers


def functions(source: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the `@triton.jit` functions of a generated module. No file is written: the text goes to `linecache`."""
    file = f"<llmbuild {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": "llmbuild_row_programs"}
    exec(compile(source, file, "exec"), module)
    return {name: module[name] for name in names}


def specs(parts: Partition, *, pdl: bool = False) -> list[KernelSpec]:
    """Return what is compiled for the row programs of a partition: all arguments are pointers to aligned buffers.

    pdl: programmatic dependent launch, on SM 90 and up.
    """
    found = functions(parts.source, tuple(kernel.name for kernel in parts.kernels))
    result = []
    for kernel in parts.kernels:
        function = found[kernel.name]
        types = (POINTER_TYPES[str(parts.buffers[name].dtype).removeprefix("torch.")] for name in kernel.arguments)
        names = [name for name in function.arg_names if name != "PDL"]
        signature = dict(zip(names, types, strict=True))
        result.append(
            KernelSpec(
                kernel.name,
                function,
                signature,
                {"PDL": pdl},
                divisible_by_16=pointers(signature),
                grid=kernel.grid,
                num_warps=kernel.num_warps,
                num_stages=1,
                options={"launch_pdl": True} if pdl else {},
            )
        )
    return result
