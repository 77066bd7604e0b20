"""The cuda target: FX graph → launch plan and compiled kernels, built on a machine that needs no GPU.

What it leaves in the engine, for each kind of GPU that it was asked for:

    plan/sm90/plan.json        what runs in a step, in order
    plan/sm90/kernels.bin      the compiled kernels
    plan/row_programs.py       source of the generated kernels, to be read
    weights/cuda.safetensors   every weight, as the kernels read it; shared by all GPUs
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from llmbuild.builder.ir import Program, WeightExpr
from llmbuild.builder.passes.edit import is_tensor
from llmbuild.builder.targets.base import CompiledTarget, CompileOptions
from llmbuild.builder.targets.cuda.aot import COMPILER, TRITON, compile_all, triton_problem
from llmbuild.builder.targets.cuda.sms import SMS, parse_sms
from llmbuild.builder.targets.weight_file import WeightFile, plain_entry
from llmbuild.engine.kernel_pack import write_pack

if TYPE_CHECKING:
    from llmbuild.builder.targets.base import Limits
    from llmbuild.builder.targets.cuda.lowering import Planned

PLAN, KERNELS, SOURCE, WEIGHTS = "plan.json", "kernels.bin", "plan/row_programs.py", "weights/cuda.safetensors"
REQUIRES = {"cuda-bindings": ">=12.9,<14"}


class CudaTarget:
    """See the module."""

    name = "cuda"
    dtypes = ("bfloat16", "float16", "float32")
    kv_caches = ("fp8", "int8")

    def probe(self) -> str | None:
        problem = triton_problem()
        return None if problem is None else f"{problem}: pip install 'llmbuild[cuda-build]' (Linux)"

    def supports(self, node: fx.Node) -> str | None:
        from llmbuild.builder.targets.cuda.levels import BARRIERS as FOUND
        from llmbuild.builder.targets.cuda.lowering import BARRIERS
        from llmbuild.builder.targets.cuda.rules.table import has_rule

        if node.op != "call_function" or not (is_tensor(node) or isinstance(node.meta.get("val"), (tuple, list))):
            return None
        if node.target in FOUND:
            kind, _ = FOUND[node.target]
            return None if kind in BARRIERS else f"no kernels for {kind}"
        return None if has_rule(node) else "no rule for this op"

    def compile(self, program: Program, options: CompileOptions, directory: Path) -> CompiledTarget:
        compiled, weights = write_plans(program, options, directory)
        file = WeightFile()
        for name, expression in weights.items():
            file.add(name, plain_entry(expression))
        file.write(directory / WEIGHTS, options.progress)
        compiled.weight_bytes = file.bytes_by_storage()
        return compiled


def write_plans(
    program: Program, options: CompileOptions, directory: Path
) -> tuple[CompiledTarget, dict[str, WeightExpr]]:
    """Write everything but the weights, and return what they are by the names that the plans use."""
    sms = SMS if options.sm is None else parse_sms(options.sm)
    planned = plans(program, options.limits, sms)
    weights: dict[str, WeightExpr] = {}
    for each in planned.values():
        weights.update(each.weights)
    for sm, each in planned.items():
        folder = directory / "plan" / f"sm{sm}"
        folder.mkdir(parents=True)
        progress = None if options.progress is None else partial(kernels_done, options.progress, sm)
        compiled = compile_all(list(each.specs.values()), [sm], progress=progress)
        write_pack(folder / KERNELS, compiled, compiler=COMPILER)
        (folder / PLAN).write_bytes(each.plan.to_json())
    (directory / SOURCE).write_text(next(iter(planned.values())).source, encoding="utf-8")
    toolchain = {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
    section = {
        "sms": list(sms),
        "plans": {str(sm): f"plan/sm{sm}/{PLAN}" for sm in sms},
        "kernels": {str(sm): f"plan/sm{sm}/{KERNELS}" for sm in sms},
        "weights": WEIGHTS,
    }
    return CompiledTarget(REQUIRES, {**toolchain, "triton": TRITON}, section), weights


def plans(program: Program, limits: Limits, sms: Sequence[int]) -> dict[int, Planned]:
    """Return the plan of an optimised program for each kind of GPU. The program is changed."""
    from llmbuild.builder.targets.cuda.late_scales import late_scales
    from llmbuild.builder.targets.cuda.lowered import Hardware
    from llmbuild.builder.targets.cuda.lowering import plan_program
    from llmbuild.builder.targets.cuda.partition import partition

    if (rewrite := late_scales(program)).count:
        program.rewrites.append(rewrite)
    parts = partition(program)
    return {sm: plan_program(program, limits, Hardware(sm, pdl=sm >= 90), parts) for sm in sms}


def kernels_done(progress: Callable[[int, int, str], None], sm: int, done: int, total: int, name: str) -> None:
    progress(done, total, f"kernel {name}, SM {sm}")
