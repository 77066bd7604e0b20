"""`llmbuild accuracy`: how far an engine, as it runs here, is from its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llmbuild.cli.console import print_json, print_table, progress_bars, stdout_kept_clean
from llmbuild.cli.errors import reporting

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
    device: Annotated[int | None, typer.Option(help="GPU of an engine of the cuda target. Left out: 0.")] = None,
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
        from llmbuild.runtime.loading import load_engine

        with stdout_kept_clean(), progress_bars(BARS, enabled=not as_json) as progress:
            loaded = load_engine(engine, num_threads=threads, device=device)
            try:
                from llmbuild.builder.accuracy.engine import EngineUnderTest, measure_engine
                from llmbuild.builder.accuracy.record import Thresholds, check
                from llmbuild.engine.reader import open_engine
                from llmbuild.runtime.executor import StepInput

                opened = open_engine(engine)
                limits, executor = loaded.limits, loaded.executor
                definition = engine / "tokenizer" / "tokenizer.json"
                subject = EngineUnderTest(
                    forward=lambda step: executor.forward(StepInput(*step)),
                    block_size=executor.block_size,
                    max_num_tokens=limits.max_num_tokens,
                    max_seq_len=limits.max_seq_len,
                    vocab_size=limits.vocab_size,
                    tokenizer=definition.read_bytes() if definition.is_file() else None,
                )
                found = measure_engine(
                    subject,
                    against,
                    text=text,
                    tokens=tokens,
                    trust_remote_code=trust_remote_code,
                    ignore_config_keys=tuple(ignore_config_key or ()),
                    progress=lambda done, total, label: progress("accuracy", done, total, label),
                )
            finally:
                loaded.executor.close()
        record = found.to_dict()
        thresholds = Thresholds(**given)
        if as_json:
            manifest = opened.manifest
            about = {"engine": str(engine), "model": manifest.model.name, "target": manifest.target.name}
            print_json({**about, "quant": manifest.precision.recipe, **record, "thresholds": thresholds.to_dict()})
        else:
            print_accuracy(record, f"{engine} against {against}")
        check(thresholds, found.figures, None, opened.manifest.precision.recipe)


def print_accuracy(record: dict[str, Any], title: str) -> None:
    """Print the figures of a record as a table. record: as in `report.json`."""
    kl, perplexity, text = record["kl"], record["perplexity"], record["text"]
    rows = [
        ("text", f"{text['source']}, {record['tokens']} tokens, sha256 {text['sha256'][:16]}"),
        ("KL to the unquantized model", f"mean {_cell(kl['mean'])}, p99 {_cell(kl['p99'])}, max {_cell(kl['max'])}"),
        ("same best token", _percent(record["top1"])),
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
