"""The command `llmbuild`: one file a command. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import llmbuild
from llmbuild.cli import accuracy, autoquant, bench, calibrate, chat, convert, inspect, run, selftest, verify
from llmbuild.cli.errors import DEBUG_VARIABLE

# Plain help and errors: rich would take longer to import than everything else together.
app = typer.Typer(
    name="llmbuild",
    help="Ahead-of-time engines for Hugging Face decoder LMs, and a small runtime that serves them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert")(convert.convert)
app.command("calibrate")(calibrate.calibrate)
app.command("autoquant")(autoquant.autoquant)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("accuracy")(accuracy.accuracy)
app.command("selftest")(selftest.selftest)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(llmbuild.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of user mistakes too.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def entry_point() -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        # A model's text holds any character; a terminal that cannot show one gets a replacement, not a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="llmbuild")
