"""`llmbuild calibrate`: statistics of what linears read, gathered once for many builds, or merged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmbuild.cli.console import print_json, print_table, progress_bars, stdout_kept_clean, terminate_cleanly
from llmbuild.cli.errors import reporting
from llmbuild.errors import ConfigError
from llmbuild.units import human_size

if TYPE_CHECKING:
    from llmbuild.quantization.calibration.file import StatisticsFile

BARS = {"trace": "tracing", "calibrate": "calibrating"}


def calibrate(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="Hugging Face model directory. Not with --from.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="STATS", help="File of statistics to write.")
    ] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="STATS", help="Merge files of one model over different texts. Several times."),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE", help="What they are for; others need less space. Left out: int4-gptq, which serves all."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="As convert has it. May be given several times.")
    ] = None,
    quant_layer: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN=RECIPE", help="As convert has it. May be given several times.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text, or .jsonl of objects with a text. Left out: Python's own docs."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Most tokens of the text. Left out: 32768.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="float32|bfloat16|float16", help="What is computed in. Left out: float32.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file at STATS.")] = False,
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
    """Gather statistics for `convert --calibration`, one layer in memory at a time; or merge files of them."""
    with reporting(as_json=as_json), terminate_cleanly():
        if output is None:
            raise ConfigError(
                "no file of statistics is given", where="--output", hint="llmbuild calibrate MODEL -o STATS"
            )
        if (model is None) == (not sources):
            what = "neither a model nor files to merge" if model is None else "both a model and files to merge"
            raise ConfigError(f"{what} are given", hint="give MODEL to run a text, or --from for each file to merge")
        run: dict[str, Any] = {
            "quant": quant,
            "exclude": exclude,
            "quant_layer": quant_layer,
            "text": text,
            "tokens": tokens,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code or None,
            "ignore_config_key": ignore_config_key,
        }
        if model is None:
            assert sources is not None
            unused = next((name for name, value in run.items() if value is not None), None)
            if unused is not None:
                option = "--" + unused.replace("_", "-")
                raise ConfigError("merging runs no text", where=option, hint="leave the option out")
            from llmbuild.builder.calibrate_model import merge_statistics

            file = merge_statistics(sources, output, force=force)
        else:
            from llmbuild.builder.calibrate_model import calibrate_model
            from llmbuild.builder.options import BuildConfig

            config = BuildConfig(
                model=model,
                output=output,
                quant=quant,
                exclude=tuple(exclude or ()),
                quant_layers=tuple(quant_layer or ()),
                calibration=output,
                calibration_text=text,
                calibration_tokens=tokens,
                dtype=dtype,
                force=force,
                trust_remote_code=trust_remote_code,
                ignore_config_keys=tuple(ignore_config_key or ()),
            )
            if text is None and not as_json:
                print("chosen: documentation strings of the installed Python as text", file=sys.stderr)
            with stdout_kept_clean(), progress_bars(BARS, enabled=not as_json) as progress:
                file = calibrate_model(config, progress)
        found = facts(file)
        if as_json:
            print_json(found)
        else:
            print_facts(found)


def facts(file: StatisticsFile) -> dict[str, Any]:
    """Return what `--json` prints."""
    description = file.description
    return {
        "path": str(file.path),
        "sha256": file.sha256,
        "bytes": file.path.stat().st_size,
        "model": description.model,
        "dtype": description.dtype,
        "window": description.window,
        "texts": [{"source": text.name, "sha256": text.sha256, "tokens": text.tokens} for text in description.texts],
        "inputs": len(description.inputs),
        "gram_matrices": sum(layout.gram for layout in description.inputs.values()),
    }


def print_facts(found: dict[str, Any]) -> None:
    rows = [
        ("file", f"{found['path']}, {human_size(found['bytes'])}, sha256 {found['sha256'][:16]}"),
        ("model", f"{found['model']}, computed in {found['dtype']}, windows of {found['window']} tokens"),
        *(("text", f"{text['source']}, {text['tokens']} tokens") for text in found["texts"]),
        ("inputs of linears and caches", f"{found['inputs']}, {found['gram_matrices']} with Gram matrices"),
    ]
    print_table("Calibration statistics", ("", ""), rows)
