"""`llmbuild calibrate`: the statistics of a model without an engine, for any build of it that comes later."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmbuild.builder.build import under
from llmbuild.builder.options import DTYPES, BuildConfig, check_build_packages
from llmbuild.errors import ConfigError, nearest
from llmbuild.quantization.recipes import customized

if TYPE_CHECKING:
    from llmbuild.builder.build import Progress
    from llmbuild.quantization.calibration.file import StatisticsFile

# It needs Gram matrices, and everything else is always kept: its statistics serve every recipe.
MOST_DEMANDING = "int4-gptq"


def calibrate_model(config: BuildConfig, progress: Progress | None = None) -> StatisticsFile:
    """Run a text through a model and write what its linears read to `config.calibration`.

    Args:
        config: model, calibration, calibration_text and _tokens; quant with exclude and quant_layers: what the
            statistics are for, `MOST_DEMANDING` when it is None; dtype, float32 when it is None. Limits and target do
            not matter.

    Raises:
        ConfigError: The recipe needs no statistics of this model, the file exists, or the text cannot be used.
        UserError: The model cannot be read, or computes something that is not finite.
    """
    path = config.calibration
    assert path is not None
    quant = config.quant or MOST_DEMANDING
    recipe = customized(quant, config.exclude, config.quant_layers)
    if not recipe.calibrated:
        raise ConfigError(
            f"recipe {quant!r} needs no calibration",
            where="--quant",
            hint="leave it out for statistics that serve all recipes",
        )
    dtype = config.dtype or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}", where="--dtype", hint=nearest(dtype, list(DTYPES)))
    check_new(path, force=config.force)
    check_build_packages()
    under("trace", progress)(0, 1, "importing torch and transformers")
    import torch

    from llmbuild.builder.calibration import Calibration
    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.pipeline import optimize

    program = load_program(
        config.model,
        dtype=getattr(torch, dtype),
        progress=under("trace", progress),
        trust_remote_code=config.trust_remote_code,
        ignore_config_keys=config.ignore_config_keys,
    )
    calibration = Calibration(config, under("calibrate", progress))
    optimize(program, recipe, calibrate=calibration.gather)
    if calibration.file is None:
        raise ConfigError(
            f"recipe {quant!r} needs no statistics of {program.info.name}: its weights are kept as they are stored",
            where="--quant",
            hint="calibrate the checkpoint that it was quantized from",
        )
    return calibration.file


def merge_statistics(paths: list[Path], output: Path, *, force: bool) -> StatisticsFile:
    """Merge statistics of the same model over different texts into `output`.

    Raises:
        ConfigError: Fewer than two files, the output exists, or the files do not belong together.
    """
    if len(paths) < 2:
        raise ConfigError("merging takes at least two files", where="--from", hint="give --from several times")
    check_new(output, force=force)
    check_build_packages()
    from llmbuild.quantization.calibration.file import StatisticsFile, merge

    merge(paths, output)
    return StatisticsFile(output)


def check_new(path: Path, *, force: bool) -> None:
    """Raise ConfigError if a file would be lost, or there is no directory for it."""
    if path.exists() and not (force and path.is_file()):
        raise ConfigError(f"{path} exists", where="--output", hint="give another path, or --force to replace a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory {path.absolute().parent}", where="--output", hint="make it first")
