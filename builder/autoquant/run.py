"""`llmbuild autoquant`: units → what each recipe costs and loses in them → descent → measured choice → quant config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmbuild.builder.autoquant.config import AutoquantConfig
from llmbuild.builder.build import Progress, under
from llmbuild.builder.options import check_build_packages
from llmbuild.errors import AccuracyError, UnsupportedError

if TYPE_CHECKING:
    from llmbuild.builder.autoquant.result import Autoquant, Measured, UnitResult
    from llmbuild.builder.autoquant.subject import Subject

WORST = 3  # units that an error names


def autoquant(config: AutoquantConfig, progress: Progress | None = None) -> Autoquant:
    """Search the precision of each unit and write the quant config and its plot.

    Raises:
        AccuracyError: No choice keeps the bound, or logits are no distribution.
        ConfigError: A file exists, a text cannot be used, or no candidate rounds anything.
        UserError: The model cannot be read.
    """
    from llmbuild.builder.calibrate_model import check_new

    for path in (config.output, config.plot):
        check_new(path, force=config.force)
    check_build_packages()
    notes: list[str] = []
    dtype = resolve_dtype(config, notes)
    under("trace", progress)(0, 1, "importing torch and transformers")
    from llmbuild.builder.autoquant.result import Autoquant, pareto_plot
    from llmbuild.builder.autoquant.search import descent, search
    from llmbuild.builder.autoquant.subject import Subject

    subject = Subject(config, dtype, progress)
    losses = subject.losses(under("sensitivity", progress))
    search(descent(subject.costs(), losses), lambda choice: subject.measure(choice).figures.kl_mean, config.max_kl)
    for option in range(len(config.candidates)):
        subject.measure(subject.uniform(option))
    chosen = subject.best()
    if chosen is None:
        raise unreachable(subject, losses)
    section = search_section(subject, dtype, chosen)
    written = subject.quant_config(chosen.choice).model_copy(update={"search": section})
    measured = sorted(subject.measured.values(), key=lambda each: (each.stored, each.name, each.choice))
    config.output.write_text(written.to_json(), encoding="utf-8")
    config.plot.write_text(pareto_plot(measured, config.max_kl, config.objective), encoding="utf-8")
    return Autoquant(config.output, config.plot, section, chosen, measured, results(subject, chosen, losses), notes)


def resolve_dtype(config: AutoquantConfig, notes: list[str]) -> str:
    """Return what the target computes in; adds a note when that was not given.

    Raises:
        UnsupportedError: It does not compute in the dtype given.
    """
    from llmbuild.builder.targets.registry import find_target

    target = find_target(config.target)
    if config.dtype is None:
        notes.append(f"dtype {target.dtypes[0]}: what the {target.name} target computes in")
        return target.dtypes[0]
    if config.dtype not in target.dtypes:
        raise UnsupportedError(
            f"the {target.name} target does not compute in {config.dtype}",
            where="--dtype",
            hint=f"use --dtype {' or '.join(target.dtypes)}",
        )
    return config.dtype


def unreachable(subject: Subject, losses: Sequence[Sequence[float]]) -> AccuracyError:
    """Return the error where no choice that was measured keeps the bound."""
    from llmbuild.builder.accuracy.record import shown

    candidates, max_kl = subject.config.candidates, subject.config.max_kl
    best = min(each.figures.kl_mean for each in subject.measured.values())
    least = sorted(((min(each), unit.name) for each, unit in zip(losses, subject.units, strict=True)), reverse=True)
    named = ", ".join(f"{name} (KL {shown(loss)} alone)" for loss, name in least[:WORST] if loss > 0)
    more = " and ".join(name for name in ("int8-wo", "none") if name not in candidates)
    return AccuracyError(
        f"no choice of {', '.join(candidates)} keeps the mean KL within --max-kl {max_kl:g}: the best reaches "
        f"{shown(best)}",
        where=f"worst units: {named}" if named else None,
        hint="allow more" + (f", or give --candidates with more bits: {more}" if more else ""),
    )


def search_section(subject: Subject, dtype: str, chosen: Measured) -> dict[str, Any]:
    """Return what the config tells of the search: what was asked for, on what, and what was measured."""
    import llmbuild
    from llmbuild.builder.calibration import model_sha256

    config = subject.config
    return {
        "llmbuild": llmbuild.__version__,
        "model": subject.exact.info.name,
        "model_sha256": model_sha256(subject.exact),
        "target": config.target,
        "dtype": dtype,
        "candidates": list(config.candidates),
        "objective": config.objective,
        "max_kl": config.max_kl,
        "sensitivity": subject.tried_on.to_dict(subject.windows),
        "accuracy": subject.measured_on.to_dict(list(subject.held_out.windows)),
        "calibration": None if subject.calibration is None else subject.calibration.section(),
        "measured": chosen.to_dict(),
    }


def results(subject: Subject, chosen: Measured, losses: Sequence[Sequence[float]]) -> list[UnitResult]:
    """Return what became of each unit."""
    from llmbuild.builder.autoquant.result import UnitResult

    found = []
    recipes = subject.recipes(chosen.choice)
    for unit, options, place, recipe, alone in zip(
        subject.units, subject.options, chosen.choice, recipes, losses, strict=True
    ):
        loss = dict(zip(subject.config.candidates, alone, strict=True))
        found.append(UnitResult(unit.name, recipe, options[place].stored, options[place].read, loss))
    return found
