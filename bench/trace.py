"""Trace and optimise published configs without weights: seconds and memory, each in a process of its own.

    python bench/trace.py [--shapes llama-3.1-8b,qwen3-30b-a3b,llama-3.3-70b] [--save]

The goal is 60 s and 3 GiB each, imports included. JSON lines first, table last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from children import measure
from records import emit, environment, table, write_results
from shapes import SHAPES, make_config

GOAL_SECONDS, GOAL_BYTES = 60.0, 3 << 30


def work(shape: str) -> None:
    """The measured process: import, trace, passes; one JSON line about it."""
    begin = time.perf_counter()
    import torch

    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.pipeline import optimize
    from llmbuild.quantization.recipes import find_recipe

    imported = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_config(shape).save_pretrained(folder)
        program = load_program(Path(folder), dtype=torch.float32, dry=True)
    traced = time.perf_counter()
    nodes = len(program.graph.nodes)
    optimize(program, find_recipe("none"))
    facts = {
        "import_s": round(imported - begin, 2),
        "trace_s": round(traced - imported, 2),
        "passes_s": round(time.perf_counter() - traced, 2),
        "nodes_traced": nodes,
        "nodes": len(program.graph.nodes),
    }
    print(json.dumps(facts))


def run(shape: str) -> dict[str, Any]:
    found = measure([sys.executable, __file__, "--work", shape])
    facts = json.loads(found.stdout)
    return emit(
        kind="trace",
        shape=shape,
        wall_s=round(found.wall, 2),
        cpu_s=round(found.cpu, 2),
        peak_rss=found.rss,
        within_goal=found.wall < GOAL_SECONDS and found.rss < GOAL_BYTES,
        **facts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-3.1-8b,qwen3-30b-a3b,llama-3.3-70b")
    parser.add_argument("--save", action="store_true", help="write bench/results/DATE-trace.jsonl")
    parser.add_argument("--work", choices=sorted(SHAPES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    records = [emit(**environment(("llmbuild", "torch", "transformers")))]
    rows = [run(shape) for shape in arguments.shapes.split(",")]
    columns = ["shape", "wall_s", "cpu_s", "peak_rss", "import_s", "trace_s", "passes_s", "nodes_traced", "nodes"]
    table("trace and passes, no weights", rows, columns)
    if arguments.save:
        print(f"\nwritten to {write_results('trace', records + rows).name}")


if __name__ == "__main__":
    main()
