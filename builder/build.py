"""checkpoint → traced graph → optimised graph → target's files → engine directory: the whole build on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmbuild.builder.options import (
    BuildConfig,
    check_build_packages,
    choose,
    resolve_cache,
    resolve_dtype,
    resolve_limits,
)
from llmbuild.builder.report import BuildReport, write_report
from llmbuild.engine.manifest import REPORT_NAME
from llmbuild.engine.writer import EngineWriter, check_output

__all__ = ["BuildConfig", "BuildReport", "Progress", "build"]

# Called as progress(phase, done, total, label). phase: "trace", "calibrate", "accuracy", "weights" or "write"; done of
# total, in units of it.
Progress = Callable[[str, int, int, str], None]


def build(config: BuildConfig, *, progress: Progress | None = None) -> BuildReport:
    """Convert a model into an engine directory.

    On any failure, interruption included, `config.output` is left as it was.

    Args:
        config: What to build; see `BuildConfig`.
        progress: Told what is going on.

    Raises:
        UserError: The model, an option or the output path is at fault; the message says which and what to do.
        AccuracyError: The quantized model misses a threshold.
    """
    start = time.perf_counter()
    choices = choose(config)
    check_output(config.output, force=config.force)
    check_build_packages()

    # torch and transformers take seconds to import: only a build that can start pays for them.
    under("trace", progress)(0, 1, "importing torch and transformers")
    import torch

    from llmbuild.builder import calibration, memory, sections
    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.pipeline import optimize
    from llmbuild.builder.targets.base import CompileOptions
    from llmbuild.builder.targets.registry import find_target

    seconds = {"start": time.perf_counter() - start}
    notes = list(choices.notes)
    target = find_target(choices.target)
    dtype = resolve_dtype(config, target, notes)
    choices = resolve_cache(config, choices, target, dtype, notes)

    with phase("trace", seconds):
        program = load_program(
            config.model,
            dtype=getattr(torch, dtype),
            max_seq_len=config.max_seq_len,
            progress=under("trace", progress),
            trust_remote_code=config.trust_remote_code,
            ignore_config_keys=config.ignore_config_keys,
        )
    limits = resolve_limits(config, program.info, notes)
    nodes_traced = len(program.graph.nodes)

    statistics = calibration.Calibration(config, under("calibrate", progress))
    with phase("passes", seconds):
        measured = None
        if config.measures_accuracy:
            from llmbuild.builder.accuracy.build import MeasuredBuild

            cache = choices.recipe.kv_cache
            measured = MeasuredBuild(config, choices.quant, quantized_cache=cache is not None)
        optimize(program, choices.recipe, calibrate=statistics, after_pass=measured.after_pass if measured else None)
    estimate = memory.estimate(program)
    memory.check(estimate, config.memory_limit)
    if measured is not None:
        with phase("accuracy", seconds):
            measured.run(program, limits, under("accuracy", progress))

    with EngineWriter(config.output, force=config.force) as writer:
        writer.expect(sections.least_weight_bytes(program))
        with phase("weights", seconds):
            options = CompileOptions(limits, dtype, under("weights", progress), choices.sm, config.builder_options)
            compiled = target.compile(program, options, writer.directory)
        sections.write_tokenizer(program, writer.directory)
        record = measured.write(writer.directory) if measured else None
        write_report(writer.directory / REPORT_NAME, program, compiled.weight_bytes, nodes_traced, record)
        with phase("write", seconds):
            manifest = writer.commit(
                model=sections.model(program.info),
                target=sections.target(target.name, compiled),
                precision=sections.precision(dtype, choices.quant, compiled),
                limits=sections.limits(limits),
                kv_cache=sections.kv_cache(program, dtype, limits, choices.recipe.kv_cache, compiled.block_size),
                build=sections.build(choices, dtype, limits, choices.sm, statistics.section()),
                progress=under("write", progress),
            )
    used = {"estimate": estimate.to_dict(), "peak": memory.peak_rss()}
    return BuildReport(config.output, manifest, program.rewrites, notes, seconds, used, record)


@contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def under(phase: str, progress: Progress | None) -> Callable[..., None]:
    """Return a function of (done, total, label="") that reports under the name of a phase."""

    def report(done: int, total: int, label: str = "") -> None:
        if progress is not None:
            progress(phase, done, total, label)

    return report
