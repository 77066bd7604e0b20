"""`llmbuild autoquant`: the precision of each layer, searched under a bound on accuracy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmbuild.cli.console import print_json, print_table, progress_bars, stdout_kept_clean, terminate_cleanly
from llmbuild.cli.errors import reporting
from llmbuild.errors import ConfigError
from llmbuild.units import human_size

if TYPE_CHECKING:
    from llmbuild.builder.autoquant.result import Autoquant

BARS = {"trace": "tracing", "calibrate": "calibrating", "sensitivity": "trying", "search": "measuring"}
MOST_UNITS = 12  # in the table; --json has all


def autoquant(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face model directory, or a .gguf file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Quant config to write, for convert.")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Most mean KL from the unquantized model, in nats. Exit code 3 if none keeps it."),
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="cpu|cuda|tensorrt|tensorrt-rtx", help="What the engine will be for.")
    ] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|bfloat16|float16", help="What it computes in. Left out: as convert has it."),
    ] = None,
    sm: Annotated[str | None, typer.Option(metavar="80,90", help="GPUs that it will be for.")] = None,
    candidates: Annotated[
        str, typer.Option(metavar="RECIPE,RECIPE,...", help="Recipes to choose from, for each group of linears.")
    ] = "int4-wo,int8-wo,none",
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Statistics for int4-gptq and fp8-gptq: read if FILE exists, else gathered and written there. Give "
            "convert the same.",
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="size|decode", help="Fewest bytes of weights, or fewest that a decode step of one token reads."
        ),
    ] = "size",
    sensitivity_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text that each recipe of each group is tried on, alone. Left out: Python's own docs."
        ),
    ] = None,
    sensitivity_tokens: Annotated[int, typer.Option(help="Most tokens of it.")] = 512,
    accuracy_text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another text, that choices are measured on. Left out: Python's own docs."),
    ] = None,
    accuracy_tokens: Annotated[int, typer.Option(help="Most tokens of it.")] = 2048,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE and its plot.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    ignore_config_key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Ignore an unknown key of config.json, as convert does.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Search the precision of each layer: the smallest engine that keeps a bound on KL."""
    with reporting(as_json=as_json), terminate_cleanly():
        if output is None:
            raise ConfigError("no quant config is given", where="--output", hint="llmbuild autoquant MODEL -o FILE")
        if max_kl is None:
            raise ConfigError("no bound is given", where="--max-kl", hint="give the most mean KL in nats, such as 0.01")
        from llmbuild.builder.autoquant.config import AutoquantConfig
        from llmbuild.builder.autoquant.run import autoquant as search

        config = AutoquantConfig(
            model=model,
            output=output,
            max_kl=max_kl,
            target=target,
            dtype=dtype,
            sm=sm,
            candidates=tuple(name.strip() for name in candidates.split(",") if name.strip()),
            calibration=calibration,
            objective=objective,
            sensitivity_text=sensitivity_text,
            sensitivity_tokens=sensitivity_tokens,
            accuracy_text=accuracy_text,
            accuracy_tokens=accuracy_tokens,
            force=force,
            trust_remote_code=trust_remote_code,
            ignore_config_keys=tuple(ignore_config_key or ()),
        )
        with stdout_kept_clean(), progress_bars(BARS, enabled=not as_json) as progress:
            found = search(config, progress)
        if as_json:
            print_json(found.to_dict())
        else:
            _show(found)


def _show(found: Autoquant) -> None:
    for note in found.notes:
        print(f"chosen: {note}", file=sys.stderr)
    recipes = dict.fromkeys(unit.recipe for unit in found.units)
    rows = []
    for recipe in sorted(recipes):
        own = [unit for unit in found.units if unit.recipe == recipe]
        rows.append((recipe, len(own), human_size(sum(unit.stored for unit in own))))
    print_table("Chosen", ("recipe", "groups of linears", "weights"), rows)
    ranked = sorted(found.units, key=lambda unit: -max(unit.alone.values()))[:MOST_UNITS]
    names = list(ranked[0].alone)
    print_table(
        f"Groups that lose most, of {len(found.units)}: KL of each recipe alone",
        ("group", "chosen", *names),
        [(unit.name, unit.recipe, *(f"{unit.alone[name]:.3g}" for name in names)) for unit in ranked],
    )
    print_table(
        f"Measured on {found.chosen.figures.tokens} tokens (plot: {found.plot})",
        ("", "weights", "read in a decode step", "mean KL", "same best token", "perplexity"),
        [
            (
                each.name + (" (chosen)" if each is found.chosen else ""),
                human_size(each.stored),
                human_size(each.read),
                f"{each.figures.kl_mean:.4g}",
                f"{100 * each.figures.top1:.4g} %",
                f"{100 * each.figures.ppl_increase:+.3g} %",
            )
            for each in found.measured
        ],
    )
    command = f"llmbuild convert MODEL -o ENGINE --quant-config {found.config}"
    if found.search["calibration"] is not None:
        command += " --calibration FILE, the same"
    print(f"{found.config}: {command}")
