"""Commands in Markdown pages: what a ```console block says is run, and what it shows must be what comes out.

    ```console
    $ llmbuild convert model -o model.engine \\
    >     --max-seq-len 64
    model.engine: 0.5 MB in ... s ...
    ```

A line after `$ ` is a command, `> ` continues it. The other lines are its output: each must match a line of the real
output (stdout and stderr together), in this order, `...` matching anything; output that the page does not show is fine.
The block's first line may end with the exit code that is expected: ```console exit=2
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(r"^```console(?: exit=(\d+))?[ ]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)


@dataclass
class Command:
    """line: of the page, from 1. shown: the output lines that the page shows. exit_code: the one it expects."""

    line: int
    text: str
    exit_code: int
    shown: list[str] = field(default_factory=list)


def find_commands(page: str) -> list[Command]:
    """Return the commands of all console blocks of a page, in order."""
    commands: list[Command] = []
    for block in FENCE.finditer(page):
        first = page.count("\n", 0, block.start(2)) + 1
        started = False
        for number, line in enumerate(block[2].splitlines(), first):
            if line.startswith("$ "):
                commands.append(Command(number, line[2:], int(block[1] or 0)))
                started = True
            elif not started:
                raise ValueError(f"line {number}: a console block begins with a command, `$ ...`")
            elif line.startswith("> "):
                commands[-1].text += "\n" + line[2:]
            else:
                commands[-1].shown.append(line)
    return commands


def run_command(command: Command, directory: Path, environment: Mapping[str, str]) -> str | None:
    """Run a command in `directory`; return what differs from the page, or None."""
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=directory,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    where = f"line {command.line}: $ {command.text}"
    if done.returncode != command.exit_code:
        return f"{where}\nexit code {done.returncode}, expected {command.exit_code}\n{done.stdout}"
    missing = first_missing(command.shown, done.stdout)
    return None if missing is None else f"{where}\nthe output has no line like {missing!r} here:\n{done.stdout}"


def first_missing(shown: list[str], output: str) -> str | None:
    """Return the first shown line that no line of the output matches, after those matched before; None if none."""
    lines = iter(output.splitlines())
    for wanted in shown:
        pattern = re.compile(".*".join(re.escape(part) for part in wanted.strip().split("...")))
        if wanted.strip() not in ("", "...") and not any(pattern.fullmatch(line.strip()) for line in lines):
            return wanted
    return None
