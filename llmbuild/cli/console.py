"""What commands share on the terminal: progress bars on stderr, tables and JSON on stdout. Imports rich when used."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmbuild.units import counted

Report = Callable[[str, int, int, str], None]


@contextmanager
def progress_bars(titles: dict[str, str], *, enabled: bool = True) -> Iterator[Report]:
    """Show one bar a phase on stderr; yield `report(phase, done, total, label)`.

    Args:
        titles: Phase -> the text before its bar.
        enabled: False shows nothing. Nothing is shown either where stderr is no terminal.
    """
    if not enabled or not sys.stderr.isatty():
        yield lambda phase, done, total, label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[label]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done: int, total: int, label: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(titles.get(phase, phase), total=total, label="")
            bars.update(tasks[phase], completed=done, total=total, label=label if done < total else "")

        yield report


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on stdout; without a header row when all `columns` are empty."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(escape(column), overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width to respect
    console.print(table)


def print_passes(passes: Sequence[dict[str, Any]], note: str = "") -> None:
    """Print the passes that did something or say why not. passes: as in `report.json`."""
    rows = [(p["name"], p["count"], counted(p["declined"])) for p in passes if p["count"] or p["declined"]]
    title = f"Passes ({len(passes)} ran)" + (f": {note}" if note else "")
    print_table(title, ("pass", "count", "declined"), rows)


def print_json(data: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send what libraries print on stdout to stderr, so that stdout holds the command's result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextmanager
def terminate_cleanly() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143), so that half-written files are removed on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
