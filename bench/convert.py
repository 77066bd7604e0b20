"""Convert a generated checkpoint of a published shape: wall time, peak memory, bytes; and twice, for equal bytes.

    python bench/convert.py [--checkpoint DIR] [--shape llama-3.1-8b] [--recipes int4-wo,int8-wo] [--twice int4-wo]
                            [--folder DIR] [--save]

Without --checkpoint one is written first (bfloat16, shards of 5 GB; 16 GB for the 8B shape) and removed at the end.
Engines are removed once they are measured. The bound on memory: 1.3 × the largest shard or tensor + 1 GiB.
JSON lines first, table last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from children import measure
from records import emit, environment, table, write_results

MAKE = Path(__file__).with_name("make_checkpoint.py")


def largest_file(checkpoint: Path) -> int:
    """The largest shard; no tensor is larger than the file it lies in."""
    return max(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def file_hashes(engine: Path) -> dict[str, str]:
    manifest = json.loads((engine / "engine.json").read_text())
    return {entry["path"]: entry["sha256"] for entry in manifest["files"]}


def convert(checkpoint: Path, engine: Path, recipe: str) -> tuple[dict[str, Any], dict[str, str]]:
    command = [sys.executable, "-m", "llmbuild", "convert", str(checkpoint), "-o", str(engine)]
    found = measure([*command, "--target", "cpu", "--quant", recipe, "--json"])
    told = json.loads(found.stdout)
    hashes = file_hashes(engine)
    shutil.rmtree(engine)
    allowed = int(1.3 * largest_file(checkpoint)) + (1 << 30)
    record = {
        "kind": "convert",
        "recipe": recipe,
        "wall_s": round(found.wall, 1),
        "cpu_s": round(found.cpu, 1),
        "peak_rss": found.rss,
        "peak_allowed": allowed,
        "peak_estimated": told["memory"]["estimate"]["total"],
        "bytes_read": sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")),
        "bytes_written": told["bytes"],
        "seconds": told["seconds"],
    }
    return record, hashes


def run(checkpoint: Path, folder: Path, recipes: list[str], twice: list[str], shape: str) -> list[dict[str, Any]]:
    rows = []
    for recipe in recipes:
        record, hashes = convert(checkpoint, folder / f"{recipe}.engine", recipe)
        if recipe in twice:
            again, others = convert(checkpoint, folder / f"{recipe}.engine", recipe)
            record["identical"] = hashes == others
            record["wall_again_s"] = again["wall_s"]
        rows.append(emit(shape=shape, **record))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="from bench/make_checkpoint.py; kept")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than published, for a quick run")
    parser.add_argument("--recipes", default="int4-wo,int8-wo")
    parser.add_argument("--twice", default="int4-wo", help="recipes that are converted twice")
    parser.add_argument("--folder", type=Path, help="where checkpoint and engines go for the time of the run")
    parser.add_argument("--save", action="store_true", help="write bench/results/DATE-convert.jsonl")
    arguments = parser.parse_args()
    recipes, twice = arguments.recipes.split(","), arguments.twice.split(",")
    records = [emit(**environment(("llmbuild", "numpy", "onnx", "torch", "transformers")))]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = Path(folder) / "checkpoint"
            layers = ["--layers", str(arguments.layers)] if arguments.layers else []
            make = [sys.executable, str(MAKE), str(checkpoint), "--shape", arguments.shape, *layers]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        rows = run(checkpoint, Path(folder), recipes, twice, arguments.shape)
    columns = ["shape", "recipe", "wall_s", "peak_rss", "peak_estimated", "peak_allowed", "bytes_written", "identical"]
    table("convert, cpu target", rows, columns)
    if arguments.save:
        print(f"\nwritten to {write_results('convert', records + rows).name}")
    for row in rows:
        assert row.get("identical", True), f"{row['recipe']}: two conversions differ"
        assert row["peak_rss"] <= row["peak_allowed"], f"{row['recipe']}: {row['peak_rss']} bytes at the peak"


if __name__ == "__main__":
    main()
