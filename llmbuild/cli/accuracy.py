"""`llmbuild accuracy`: how far an engine, as it runs here, is from its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llmbuild.cli.console import print_json, print_table, progress_bars, stdout_kept_clean
from llmbuild.cli.errors import reporting
from llmbuild.cli.measured_engine import engine_under_test

BARS = {"trace": "tracing", "accuracy": "measuring"}


def accuracy(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")],
    against: Annotated[
        Path, typer.Option("--against", metavar="MODEL", help="The model it was converted from; run in float32.")
    ],
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text, or .jsonl of objects with a text. Left out: Python's own docs."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of the text.")] = 2048,
    max_kl: Annotated[float | None, typer.Option(help="Exit code 3 if the mean KL, in nats, is above.")] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(help="Exit code 3 if perplexity rises by a larger share: 0.01 is 1 %.")
    ] = None,
    min_top1: Annotated[
        float | None, typer.Option(help="Exit code 3 if fewer tokens than this share have the same best token.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of an engine of the cpu target.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="GPU|interpreter",
            help="Number of the GPU, cuda engines only; interpreter: no GPU, for tiny models. Left out: 0.",
        ),
    ] = None,
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
    """Measure an engine as it runs against its model in float32: KL, top-1 agreement, perplexity."""
    with reporting(as_json=as_json):
        from llmbuild.builder.options import check_build_packages, check_thresholds

        given: dict[str, Any] = {"max_kl": max_kl, "max_ppl_increase": max_ppl_increase, "min_top1": min_top1}
        check_thresholds(given)
        check_build_packages()
        from llmbuild.engine.reader import open_engine

        ignored = tuple(ignore_config_key or ())
        with stdout_kept_clean(), progress_bars(BARS, enabled=not as_json) as progress:
            manifest = open_engine(engine, requirements=False).manifest
            with engine_under_test(
                engine,
                against,
                threads=threads,
                device=device,
                trust_remote_code=trust_remote_code,
                ignore_config_keys=ignored,
            ) as subject:
                from llmbuild.builder.accuracy.engine import measure_engine
                from llmbuild.builder.accuracy.record import Thresholds, check

                found = measure_engine(
                    subject,
                    against,
                    text=text,
                    tokens=tokens,
                    trust_remote_code=trust_remote_code,
                    ignore_config_keys=ignored,
                    progress=lambda done, total, label: progress("accuracy", done, total, label),
                )
        record = found.to_dict()
        thresholds = Thresholds(**given)
        if as_json:
            about = {"engine": str(engine), "model": manifest.model.name, "target": manifest.target.name}
            if subject.ran_on is not None:
                about["device"] = subject.ran_on
            print_json({**about, "quant": manifest.precision.recipe, **record, "thresholds": thresholds.to_dict()})
        else:
            where = "" if subject.ran_on is None else f" ({subject.ran_on})"
            print_accuracy(record, f"{engine}{where} against {against}")
        check(thresholds, found.figures, None, manifest.precision.recipe)


def print_accuracy(record: dict[str, Any], title: str) -> None:
    """Print the figures of a record as a table. record: as in `report.json`."""
    kl, perplexity, text = record["kl"], record["perplexity"], record["text"]
    rows = [
        ("text", f"{text['source']}, {record['tokens']} tokens, sha256 {text['sha256'][:16]}"),
        ("KL to the unquantized model", f"mean {_cell(kl['mean'])}, p99 {_cell(kl['p99'])}, max {_cell(kl['max'])}"),
        ("same best token", _percent(record["top1"])),
        *([("error of the logits", _cell(record["logits_error"]))] if "logits_error" in record else []),
        (
            "perplexity",
            f"{_cell(perplexity['candidate'])}, unquantized {_cell(perplexity['reference'])} "
            f"({_percent(perplexity['increase'], '+')})",
        ),
    ]
    print_table(f"Accuracy: {title}", ("", ""), rows)


def print_layers(record: dict[str, Any], count: int = 8) -> None:
    """Print the layers of a record that add most error themselves."""
    worst = sorted(record["layers"], key=lambda each: (-_size(each["own"]), -_size(each["error"])))[:count]
    rows = [
        (each["name"], each["kind"], _cell(each["own"]), _cell(each["error"]), _cell(each["cosine"])) for each in worst
    ]
    title = f"Layers that err most, of {len(record['layers'])} (accuracy.svg shows all)"
    print_table(title, ("layer", "kind", "own error", "error", "cosine"), rows)


def _size(value: float | None) -> float:
    return float("inf") if value is None else value


def _cell(value: float | None) -> str:
    return "infinite" if value is None else f"{value:g}"


def _percent(value: float | None, sign: str = "") -> str:
    return "infinite" if value is None else f"{100 * value:{sign}.4g} %"
