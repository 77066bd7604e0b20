"""`llmbuild inspect`: what an engine holds and what it was built for. Needs none of the target's packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmbuild.cli.console import print_json, print_passes, print_table
from llmbuild.cli.errors import reporting
from llmbuild.errors import ConfigError
from llmbuild.units import human_size

if TYPE_CHECKING:
    from llmbuild.engine.reader import Engine


def inspect(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")],
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what an engine of cuda or TensorRT runs in a step instead.")
    ] = False,
    sm: Annotated[
        int | None, typer.Option(help="Which GPU's plan, such as 90. Left out: the first of the engine.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print manifest, report and findings as one JSON object.")
    ] = False,
) -> None:
    """Show model, target, limits, precision, files and build report of an engine."""
    with reporting(as_json=as_json):
        from llmbuild.engine.manifest import REPORT_NAME
        from llmbuild.engine.reader import open_engine
        from llmbuild.engine.requirements import unmet_requirements

        opened = open_engine(engine, requirements=False)
        if plan:
            if opened.manifest.target.name in ("tensorrt", "tensorrt-rtx"):
                from llmbuild.cli.layers import print_layers_of

                if sm is not None:
                    raise ConfigError("the engine has one plan", where="--sm", hint="leave --sm out")
                print_layers_of(opened, as_json=as_json)
                return
            from llmbuild.cli.plan import print_plan

            print_plan(opened, sm, as_json=as_json)
            return
        if sm is not None:
            raise ConfigError("--sm chooses a plan to show", where="--sm", hint="add --plan, or leave --sm out")
        report = json.loads(opened.file(REPORT_NAME).read_text(encoding="utf-8"))
        unmet = [
            f"{package}{text} ({found or 'not'} installed)"
            for package, text, found in unmet_requirements(opened.manifest.target)
        ]
        if as_json:
            print_json(
                {
                    "engine": str(engine),
                    "manifest": opened.manifest.model_dump(mode="json"),
                    "report": report,
                    "unlisted_files": list(opened.unlisted),
                    "unmet_requirements": unmet,
                }
            )
        else:
            _show(opened, report, unmet)


def _show(engine: Engine, report: dict[str, Any], unmet: list[str]) -> None:
    manifest = engine.manifest
    model, limits, precision, kv = manifest.model, manifest.limits, manifest.precision, manifest.kv_cache
    facts: list[tuple[str, object]] = [
        ("model", f"{model.name} ({model.architecture}, from {model.source_kind})"),
        ("layers", f"{model.num_layers}, hidden size {model.hidden_size}, vocabulary {model.vocab_size}"),
        ("end of sequence", ", ".join(map(str, model.eos_token_ids)) or "none"),
        ("target", manifest.target.name),
        ("runs with", _ranges(manifest.target.requires)),
        ("built with", _ranges(manifest.target.toolchain, " ")),
        ("precision", f"{precision.recipe}, computed in {precision.dtype}"),
        ("batch size", f"at most {limits.max_batch_size} sequences in a step"),
        ("tokens", f"at most {limits.max_num_tokens} in a step"),
        ("sequence", f"at most {limits.max_seq_len} tokens (the model: {model.max_position_embeddings})"),
        ("KV cache", f"{kv.dtype}, {human_size(kv.token_bytes)} a token, blocks of {kv.block_size} tokens"),
        ("llmbuild", manifest.build.llmbuild_version),
    ]
    print_table(f"Engine {engine.path}", ("", ""), facts)
    print_table("Weights", ("format", "size"), [(name, human_size(n)) for name, n in sorted(precision.weights.items())])
    nodes = report["graph_nodes"]
    print_passes(report["passes"], f"{nodes['traced']} graph nodes became {nodes['optimized']}")
    if "accuracy" in report:
        from llmbuild.cli.accuracy import print_accuracy, print_layers

        print_accuracy(report["accuracy"], f"{precision.recipe} against the unquantized model, when it was built")
        print_layers(report["accuracy"])
    files = [(entry.path, human_size(entry.size), entry.sha256[:16]) for entry in manifest.files]
    print_table("Files", ("path", "size", "sha256"), files)
    for name in engine.unlisted:
        print(f"note: {name} lies in the directory and is not part of the engine", file=sys.stderr)
    for fact in unmet:
        print(f"note: this machine cannot run it as it is: it needs {fact}", file=sys.stderr)


def _ranges(packages: dict[str, str], separator: str = "") -> str:
    return ", ".join(f"{name}{separator}{text}" for name, text in sorted(packages.items()))
