"""An engine of the cuda target without a GPU: its plan and its weights, in Triton's interpreter on the CPU.

An engine holds kernels for GPUs alone. What the interpreter runs is their source, which planning the same model with
the options that the engine records gives again; that it is the same plan is checked byte by byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.engine.reader import Engine
from llmbuild.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from llmbuild.builder.targets.cuda.lowering import Planned
    from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter

SOURCE = "plan/row_programs.py"


def interpreted(
    engine: Engine, model: Path, *, trust_remote_code: bool = False, ignore_config_keys: tuple[str, ...] = ()
) -> PlanInterpreter:
    """Return what runs the engine's steps, with blocks for one sequence of the engine's longest.

    Args:
        engine: Of the cuda target. Of several GPUs that it is for, the plan of the first is run.
        model: The model that it was converted from.

    Raises:
        ConfigError: The engine is of another target, or Triton is missing.
        EngineError: The plan is not what this version makes of the model.
    """
    from safetensors.torch import load_file

    from llmbuild.builder.targets.cuda.aot import INSTALL, triton_problem

    manifest = engine.manifest
    if manifest.target.name != "cuda":
        raise ConfigError(
            f"the interpreter runs engines of the cuda target; this one is of the {manifest.target.name} target",
            where="--device",
            hint="leave --device out",
        )
    problem = triton_problem()
    if problem is not None:
        raise ConfigError(f"the interpreter is Triton's: {problem}", where="--device", hint=INSTALL)
    from llmbuild.builder.targets.cuda.plan_interpreter import PlanInterpreter

    section = manifest.target.section
    sm = first_sm(engine)
    planned = planned_again(engine, model, sm, trust_remote_code, ignore_config_keys)
    written = engine.file(section["plans"][str(sm)]).read_bytes()
    if planned.plan.to_json() != written or planned.source != engine.file(SOURCE).read_text(encoding="utf-8"):
        raise EngineError(
            f"this version of llmbuild plans {model.name} otherwise than the engine was",
            where=str(engine.path),
            hint="give --against the model that it was converted from, or convert that again with this version",
        )
    blocks = -(-manifest.limits.max_seq_len // manifest.kv_cache.block_size)
    return PlanInterpreter(planned, blocks, load_file(engine.file(section["weights"])))


def first_sm(engine: Engine) -> int:
    """Return the GPU, 90 for 9.0, whose plan is run."""
    return int(engine.manifest.target.section["sms"][0])


def planned_again(
    engine: Engine, model: Path, sm: int, trust_remote_code: bool, ignore_config_keys: tuple[str, ...]
) -> Planned:
    """Plan a model as the engine was. No weight is read: what a calibration found is in the engine's weights."""
    import torch

    from llmbuild.builder.calibration import NothingKnown
    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.options import BuildConfig, choose
    from llmbuild.builder.pipeline import optimize
    from llmbuild.builder.targets.base import Limits
    from llmbuild.builder.targets.cuda.target import plans

    manifest = engine.manifest
    told: dict[str, Any] = manifest.build.options
    dtype, cap = manifest.precision.dtype, manifest.limits
    config = BuildConfig(
        model=model,
        output=engine.path,  # nothing is written
        target="cuda",
        dtype=dtype,
        sm=told.get("sm"),
        quant=told["quant"],
        exclude=tuple(told.get("exclude", ())),
        quant_layers=tuple(told.get("quant_layers", ())),
        kv_cache_dtype=told.get("kv_cache_dtype", dtype),
    )
    program = load_program(
        model,
        dtype=getattr(torch, dtype),
        max_seq_len=cap.max_seq_len,
        trust_remote_code=trust_remote_code,
        ignore_config_keys=ignore_config_keys,
    )
    optimize(program, choose(config).recipe, calibrate=lambda *_: NothingKnown())
    limits = Limits(cap.max_batch_size, cap.max_num_tokens, cap.max_seq_len, manifest.kv_cache.block_size)
    return plans(program, limits, [sm])[sm]
