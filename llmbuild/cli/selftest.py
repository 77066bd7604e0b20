"""`llmbuild selftest`: a tiny model through build, load and steps of each target, as a report that can be sent."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from llmbuild.cli.console import print_json, stdout_kept_clean
from llmbuild.cli.errors import EXIT_DEFECT, reporting
from llmbuild.errors import ConfigError, nearest
from llmbuild.units import human_size

REPORT_VERSION = 1


def selftest(
    target: Annotated[
        str | None, typer.Option(metavar="cpu|cuda|tensorrt|tensorrt-rtx", help="What to test. Left out: all.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write the report there, as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")] = False,
) -> None:
    """Build a tiny model, run it here and compare it with its oracle. Exit code 1 when a step fails.

    Nothing is downloaded. Steps that this machine cannot take are said with the reason.
    """
    with reporting(as_json=as_json):
        from llmbuild.builder.options import check_build_packages
        from llmbuild.builder.targets.registry import TARGETS

        if target is not None and target not in TARGETS:
            raise ConfigError(f"unknown target {target!r}", where="--target", hint=nearest(target, list(TARGETS)))
        if output is not None and not output.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {output.parent}", where="--output", hint="make it first")
        check_build_packages()
        with stdout_kept_clean():
            report = run([target] if target is not None else list(TARGETS))
        if output is not None:
            output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if as_json:
            print_json(report)
        else:
            show(report)
        if report["failed"]:
            raise typer.Exit(EXIT_DEFECT)


def run(targets: list[str]) -> dict[str, Any]:
    """Test targets and return the report: JSON values, without names of users or hosts."""
    import tempfile

    from llmbuild.selftest.environment import environment, find_gpu
    from llmbuild.selftest.steps import Oracle, test_target
    from llmbuild.selftest.tiny_model import write_model

    start = time.perf_counter()
    gpu = find_gpu()
    with tempfile.TemporaryDirectory(prefix="llmbuild-selftest-") as folder:
        model = write_model(Path(folder, "model"))
        oracle = Oracle(model)
        records = [test_target(target, model, oracle, gpu, Path(folder)) for target in targets]
    counts = {state: sum(record.count(state) for record in records) for state in ("passed", "failed", "not run")}
    return {
        "report_version": REPORT_VERSION,
        "machine": environment(gpu),
        "targets": [record.to_dict() for record in records],
        "passed": counts["passed"],
        "failed": counts["failed"],
        "not_run": counts["not run"],
        "seconds": round(time.perf_counter() - start, 1),
    }


def show(report: dict[str, Any]) -> None:
    """Print a report as text."""
    machine = report["machine"]
    print(f"llmbuild {machine['llmbuild']}, Python {machine['python']}, {machine['system']}")
    found = machine["packages"].items()
    print("installed: " + ", ".join(f"{name} {version}" for name, version in found if version is not None))
    print("missing: " + (", ".join(name for name, version in found if version is None) or "none"))
    gpu = machine["gpu"]
    if gpu is None:
        print(f"GPU: none: {machine['no_gpu']}")
    else:
        free, total = gpu["memory"]
        memory = f"{human_size(free)} of {human_size(total)} free"
        print(f"GPU: {gpu['name']}, SM {gpu['sm']}, driver for CUDA {gpu['cuda']}, {memory}")
    for record in report["targets"]:
        print(f"\n{record['target']}")
        for step in record["steps"]:
            first, *rest = step["detail"].splitlines() or [""]
            print(f"  {step['state']:<8} {step['name']:<13} {step['seconds']:6.2f} s  {first}")
            for line in rest:
                print(f"      {line}")
    print(f"\n{report['passed']} passed, {report['failed']} failed, {report['not_run']} not run: {report['seconds']} s")
