"""`llmbuild verify`: prove that an engine is exactly what was built, or name every file that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmbuild.cli.console import print_json, progress_bars
from llmbuild.cli.errors import EXIT_USER, reporting
from llmbuild.units import human_size


def verify(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")],
    as_json: Annotated[
        bool, typer.Option("--json", help='Print {"ok", "files", "bytes", "problems"} on stdout, also when not ok.')
    ] = False,
) -> None:
    """Check format, files and SHA-256 hashes of an engine. Exit code 2 when a file is wrong."""
    with reporting(as_json=as_json):
        from llmbuild.engine.hashing import walk
        from llmbuild.engine.verify import verify as find_problems
        from llmbuild.errors import EngineError

        sizes = [path.lstat().st_size for _, path in walk(engine)]
        done = 0
        with progress_bars({"verify": "verifying"}, enabled=not as_json) as progress:

            def on_chunk(count: int) -> None:
                nonlocal done
                done += count
                progress("verify", done, sum(sizes), "")

            problems = find_problems(engine, on_chunk)
        if as_json:
            listed = [{"path": problem.path, "what": problem.what} for problem in problems]
            print_json({"ok": not problems, "files": len(sizes), "bytes": sum(sizes), "problems": listed})
            if problems:
                raise typer.Exit(EXIT_USER)
        elif problems:
            lines = "".join(f"\n  {problem}" for problem in problems)
            raise EngineError(
                f"{len(problems)} wrong file(s) in the engine:{lines}",
                where=str(engine),
                hint="restore these files from a good copy, or convert the model again with --force",
            )
        else:
            print(f"{engine}: ok, {len(sizes)} files, {human_size(sum(sizes))}")
