"""Run a command and measure it: wall time, CPU time, and the most memory that it held."""

from __future__ import annotations

import os
import subprocess
import time
from typing import NamedTuple


class Measured(NamedTuple):
    """wall, cpu: seconds. rss: bytes at the peak, pages of mapped files included. stdout: what it printed."""

    wall: float
    cpu: float
    rss: int
    stdout: str


def measure(command: list[str]) -> Measured:
    """Run `command` to its end; stderr passes through.

    The peak of a child begins with that of its parent: import nothing large before calling this.

    Raises:
        SystemExit: The command failed.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    stdout = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Measured(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, stdout)
