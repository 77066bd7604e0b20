"""`llmbuild convert`: a model becomes an engine directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmbuild.cli.accuracy import print_accuracy, print_layers
from llmbuild.cli.console import (
    print_json,
    print_passes,
    print_table,
    progress_bars,
    stdout_kept_clean,
    terminate_cleanly,
)
from llmbuild.cli.errors import reporting
from llmbuild.errors import ConfigError
from llmbuild.units import human_size

if TYPE_CHECKING:
    from llmbuild.builder.build import BuildConfig, BuildReport

BARS = {
    "trace": "tracing",
    "calibrate": "calibrating",
    "accuracy": "measuring",
    "weights": "weights",
    "write": "writing",
}


def convert(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face model directory, or a .gguf file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="ENGINE", help="Engine directory to write.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|tensorrt|tensorrt-rtx",
            help="What runs the engine. tensorrt builds on the GPU that is to run it.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|bfloat16|float16", help="What is computed in. Left out: cpu float32, cuda bfloat16."
        ),
    ] = None,
    sm: Annotated[
        str | None,
        typer.Option(
            metavar="80,90",
            help="GPUs to compile for. cuda: 80, 86, 89, 90, 100, 120, left out: all. tensorrt-rtx: 75, 80, 86, 89, "
            "120, 121, left out: 86, 89 and 120. tensorrt: the one here.",
        ),
    ] = None,
    builder_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Tell TensorRT's builder, as trtexec does (builderOptimizationLevel=5). May be given several times.",
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="none, int8-wo, int8-wo-channel, int4-wo, int4-wo-g128, -g64 or -g32, each with -asym too, int4-awq, "
            "int4-gptq, fp8, fp8-lm-head, fp8-gptq, fp8-static, fp8-block, int8, int8-sq, int8-sq-static, gguf or "
            "stored. Left out: gguf (the file's own blocks) for GGUF, stored for quantized checkpoints, else none.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave weights plain whose name in the checkpoint matches ('*.o_proj.*'). May be given several times.",
        ),
    ] = None,
    quant_layer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=RECIPE",
            help="Another recipe for weights whose name matches ('*.layers.0.*=int8-wo'). May be given several times.",
        ),
    ] = None,
    quant_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What autoquant found, in place of --quant, --quant-layer and --exclude."),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="auto|fp8|int8",
            help="KV cache in 8 bits, with any --quant: fp8 with calibrated scales, or int8 with one a token and head. "
            "auto: what the checkpoint describes, else what is computed in, which may also be named.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Statistics for int4-awq and int4-gptq: read if FILE exists, else gathered and written there.",
        ),
    ] = None,
    calibration_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to calibrate on, or .jsonl of objects with a text. Left out: documentation of this Python.",
        ),
    ] = None,
    calibration_tokens: Annotated[int | None, typer.Option(help="Most tokens of it. Left out: 32768.")] = None,
    max_batch_size: Annotated[int, typer.Option(help="Most sequences in one step.")] = 16,
    max_num_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in one step; longer prompts go in chunks. Left out: 512.")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of one sequence, prompt and output. Left out: the model's, at most 4096."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the engine at ENGINE.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Stop early if more memory is needed: 4GiB, 4G (the same), 4GB, 500M."),
    ] = None,
    ignore_config_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Ignore a key of config.json that transformers does not know. May be given several times.",
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Exit code 3 if the mean KL from the unquantized model, in nats, is above."),
    ] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(help="Exit code 3 if perplexity rises by a larger share: 0.01 is 1 %.")
    ] = None,
    min_top1: Annotated[
        float | None, typer.Option(help="Exit code 3 if fewer tokens than this share have the same best token.")
    ] = None,
    accuracy_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure accuracy on this UTF-8 text, or .jsonl of objects with a text. Left out: Python's own docs.",
        ),
    ] = None,
    accuracy_tokens: Annotated[
        int | None, typer.Option(help="Measure accuracy on at most that many tokens. Left out: 2048.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Trace, fuse and check only; reads no weights. MODEL may be config.json alone."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Convert a model into an engine directory."""
    with reporting(as_json=as_json), terminate_cleanly():
        from llmbuild.builder.build import BuildConfig, build

        if output is None and not dry_run:
            raise ConfigError("no engine directory is given", where="--output", hint="llmbuild convert MODEL -o ENGINE")
        config = BuildConfig(
            model=model,
            output=output or Path("engine"),
            target=target,
            dtype=dtype,
            sm=sm,
            builder_options=tuple(builder_option or ()),
            quant=quant,
            exclude=tuple(exclude or ()),
            quant_layers=tuple(quant_layer or ()),
            quant_config=quant_config,
            kv_cache_dtype=kv_cache_dtype,
            calibration=calibration,
            calibration_text=calibration_text,
            calibration_tokens=calibration_tokens,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            force=force,
            trust_remote_code=trust_remote_code,
            max_memory=max_memory,
            ignore_config_keys=tuple(ignore_config_key or ()),
            max_kl=max_kl,
            max_ppl_increase=max_ppl_increase,
            min_top1=min_top1,
            accuracy_text=accuracy_text,
            accuracy_tokens=accuracy_tokens,
        )
        if dry_run:
            _dry_run(config, as_json=as_json)
            return
        with stdout_kept_clean(), progress_bars(BARS, enabled=not as_json) as progress:
            report = build(config, progress=progress)
        if as_json:
            print_json(report.to_dict())
        else:
            _show(report)


def _dry_run(config: BuildConfig, *, as_json: bool) -> None:
    from llmbuild.builder.dry_run import dry_run

    with stdout_kept_clean():
        found = dry_run(config)
    if as_json:
        print_json(found.to_dict())
        return
    for note in found.notes:
        print(f"chosen: {note}", file=sys.stderr)
    print_passes(found.passes)
    rows = [
        ("architecture", found.architecture),
        ("parameters", f"{found.parameters:,}"),
        ("KV cache", f"{human_size(found.kv_bytes)} a token"),
        ("graph", f"{found.nodes[0]} nodes traced, {found.nodes[1]} after the passes"),
        ("memory", f"{human_size(found.memory.total)} at the peak of a conversion, estimated"),
        ("checkpoint", "names and shapes fit" if found.weights_checked else "not here, so not checked"),
        ("converts", "no" if found.unsupported else "yes"),
    ]
    print_table("Dry run", ("fact", "value"), rows)
    for line in found.unsupported:
        print(f"cannot be lowered: {line}")


def _show(report: BuildReport) -> None:
    from llmbuild.builder.report import passes_to_list

    for note in report.notes:
        print(f"chosen: {note}", file=sys.stderr)
    print_passes(passes_to_list(report.rewrites))
    weights = report.manifest.precision.weights
    print_table("Weights", ("format", "size"), [(name, human_size(size)) for name, size in sorted(weights.items())])
    if report.accuracy is not None:
        print_accuracy(report.accuracy, f"{report.manifest.precision.recipe} against the unquantized model")
        print_layers(report.accuracy)
    peak, guess = report.memory["peak"], report.memory["estimate"]["total"]
    print(f"memory: {human_size(peak)} at the peak, {human_size(guess)} estimated")
    phases = ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items())
    print(f"{report.output}: {human_size(report.bytes)} in {sum(report.seconds.values()):.1f} s ({phases})")
