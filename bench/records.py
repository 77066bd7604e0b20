"""What every benchmark shares: JSON records, the machine and versions they were taken on, and the tables at the end."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def emit(**record: Any) -> dict[str, Any]:
    """Print one record as a JSON line (records come first on stdout, tables last) and return it."""
    print(json.dumps(record), flush=True)
    return record


def environment(packages: Iterable[str]) -> dict[str, Any]:
    """The first record of a run: date, commit, processor, and the versions of `packages` that are installed."""
    return {
        "kind": "environment",
        "date": date.today().isoformat(),
        "commit": commit(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := package_version(name)) is not None},
    }


def commit() -> str:
    """The commit that is checked out, with "-dirty" where files differ; empty for a copy without git."""
    if shutil.which("git") is None:
        return ""
    describe = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Name of the CPU and its vector extensions that matter to the kernels."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
    by_name = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(by_name.get("flags", "").split())
    extensions = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if flag in flags]
    return f"{by_name.get('model name', 'unknown')} ({', '.join(extensions)})"


def write_results(name: str, records: list[dict[str, Any]]) -> Path:
    """Write one run as `bench/results/<date>-<name>.jsonl` and return the path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-{name}.jsonl"
    path.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records))
    return path


def table(title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print `rows` as an aligned table on stdout."""
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(text) for text in (column, *(row[i] for row in cells))) for i, column in enumerate(columns)]
    print(f"\n# {title}")
    print("  ".join(column.ljust(width) for column, width in zip(columns, widths, strict=True)))
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    sys.stdout.flush()
