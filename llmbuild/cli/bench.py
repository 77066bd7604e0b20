"""`llmbuild bench latency|throughput`: option names as in `vllm bench`, JSON lines first, a table last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from llmbuild.cli.console import print_table
from llmbuild.cli.errors import reporting
from llmbuild.cli.sampling import Gpu, KvMemory, Threads

app = typer.Typer(help="Measure an engine on this machine.", no_args_is_help=True, rich_markup_mode=None)

EngineArgument = Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts.")]
OutputJson = Annotated[Path | None, typer.Option("--output-json", help="Also write the records there, one a line.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON lines without the table.")]


@app.command("latency")
def latency(
    engine: EngineArgument,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each completion.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that start together.")] = 1,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before measuring.")] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="Batches measured.")] = 10,
    threads: Threads = None,
    device: Gpu = None,
    kv_memory_fraction: KvMemory = None,
    seed: Seed = 0,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Time of one batch: time to the first token, milliseconds a token, percentiles."""
    with reporting(as_json=as_json):
        from llmbuild import LLM
        from llmbuild.benchmark import measure_latency

        with LLM(engine, num_threads=threads, device=device, kv_memory_fraction=kv_memory_fraction) as llm:
            record = measure_latency(
                llm,
                batch_size=batch_size,
                input_len=input_len,
                output_len=output_len,
                warmup=num_iters_warmup,
                iterations=num_iters,
                seed=seed,
            )
        rows = [(name, *_cells(record[name])) for name in ("latency_ms", "ttft_ms", "ms_per_token")]
        title = f"Latency: batch {batch_size}, {input_len} tokens in, {output_len} out"
        _print(engine, record, title, rows, output_json, as_json)


@app.command("throughput")
def throughput(
    engine: EngineArgument,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 100,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each completion.")] = 128,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency", "--concurrency", min=1, help="Most requests in flight; left out: all at once."
        ),
    ] = None,
    threads: Threads = None,
    device: Gpu = None,
    kv_memory_fraction: KvMemory = None,
    seed: Seed = 0,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second over many requests served together."""
    with reporting(as_json=as_json):
        from llmbuild import AsyncLLM
        from llmbuild.benchmark import measure_throughput

        llm = AsyncLLM(engine, num_threads=threads, device=device, kv_memory_fraction=kv_memory_fraction)
        try:
            record = measure_throughput(
                llm,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                concurrency=max_concurrency,
                seed=seed,
            )
        finally:
            llm.close()
        rows: list[tuple[Any, ...]] = [
            (name, record[name], "", "", "") for name in ("requests_per_s", "output_tok_s", "total_tok_s")
        ]
        rows += [(name, *_cells(record[name])) for name in ("ttft_ms", "ms_per_token")]
        title = f"Throughput: {num_prompts} requests, {input_len} tokens in, {output_len} out"
        _print(engine, record, title, rows, output_json, as_json)


def _cells(spread: dict[str, float]) -> tuple[float, ...]:
    return (spread["mean"], spread["p50"], spread["p90"], spread["p99"])


def _print(
    engine: Path, record: dict[str, Any], title: str, rows: list[tuple[Any, ...]], output: Path | None, as_json: bool
) -> None:
    from llmbuild import __version__
    from llmbuild.engine.reader import read_manifest

    manifest = read_manifest(engine)
    about = {
        "peer": f"llmbuild-{__version__}",
        "model": manifest.model.name,
        "target": manifest.target.name,
        "tag": manifest.precision.recipe,
    }
    line = json.dumps({**about, **record}, ensure_ascii=False)
    print(line, flush=True)
    if output is not None:
        output.write_text(line + "\n", encoding="utf-8")
    if not as_json:
        print_table(title, ("", "mean", "p50", "p90", "p99"), rows)
