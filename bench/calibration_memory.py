"""Peak memory of calibrating a published shape: it must not grow with the number of layers, and little with the text.

    python bench/calibration_memory.py [--shape llama-3.1-8b] [--layers 2,6] [--tokens 128] [--folder DIR] [--save]

Each run is a process that traces a generated checkpoint with so many layers and gathers statistics with the Gram
matrices of all inputs (GPTQ) in float32, which holds twice what bfloat16 does. One more run, with fewer layers and
twice the text, says what a token takes; from it follows the peak for the default text. JSON lines first, table last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from children import measure
from records import emit, environment, table, write_results

MAKE = Path(__file__).with_name("make_checkpoint.py")
WINDOW = 64  # tokens; shorter than the default, so that a short text has several
ALLOWED = 20 << 30


def gather(checkpoint: Path, tokens: int, folder: Path) -> None:
    """In a process of its own: calibrate, and print what it took as JSON."""
    import torch

    from llmbuild.builder.calibrate import calibrate
    from llmbuild.builder.calibration import DEFAULT_TOKENS, describe
    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.memory import peak_rss
    from llmbuild.builder.passes.linear_inputs import linear_inputs
    from llmbuild.builder.pipeline import phases
    from llmbuild.quantization.calibration.file import InputLayout, StatisticsWriter, TextUse
    from llmbuild.quantization.recipes import find_recipe

    program = load_program(checkpoint, dtype=torch.float32)
    for name, apply in phases(find_recipe("none")):
        if name == "choose_formats":
            break
        apply(program)
    traced = peak_rss()
    inputs = linear_inputs(program)
    layouts = {each.key: InputLayout(each.columns, each.weights(program), True) for each in inputs}
    description = describe(program, "float32", TextUse("numbers", "0" * 64, tokens), WINDOW, layouts)
    windows = [[(7 * start + i) % 250 for i in range(WINDOW)] for start in range(tokens // WINDOW)]
    with StatisticsWriter(folder / "statistics", description) as writer:
        calibrate(program, windows, inputs, grams=layouts.keys(), write=writer.write)
    size = (folder / "statistics").stat().st_size
    found = {"traced": traced, "peak": peak_rss(), "file": size, "default_tokens": DEFAULT_TOKENS}
    print(json.dumps(found))


def run(shape: str, layers: int, tokens: int, folder: Path) -> dict:
    """Make a checkpoint, calibrate it in a child, remove both."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        checkpoint = Path(place) / "checkpoint"
        make = [sys.executable, str(MAKE), str(checkpoint), "--shape", shape, "--layers", str(layers)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        child = [sys.executable, __file__, "--child", str(checkpoint), "--tokens", str(tokens), "--folder", place]
        found = measure(child)
        told = json.loads(found.stdout)
    return emit(kind="calibration", shape=shape, layers=layers, tokens=tokens, wall_s=round(found.wall, 1), **told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", default="2,6", help="numbers of layers, rising")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="where checkpoints and statistics go for the time of the run")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write bench/results/DATE-calibration.jsonl")
    arguments = parser.parse_args()
    if arguments.child is not None:
        return gather(arguments.child, arguments.tokens, arguments.folder)
    records = [emit(**environment(("llmbuild", "torch", "transformers")))]
    counts, tokens = [int(each) for each in arguments.layers.split(",")], arguments.tokens
    rows = [run(arguments.shape, count, tokens, arguments.folder) for count in counts]
    longer = run(arguments.shape, counts[0], 2 * tokens, arguments.folder)
    each_token = max(0, longer["peak"] - rows[0]["peak"]) / tokens
    default = rows[-1]["peak"] + each_token * (longer["default_tokens"] - tokens)
    growth = (rows[-1]["peak"] - rows[0]["peak"]) / max(1, counts[-1] - counts[0])
    summary = emit(
        kind="calibration-estimate",
        shape=arguments.shape,
        bytes_a_token=round(each_token),
        bytes_a_layer=round(growth),
        peak_default_text=round(default),
        allowed=ALLOWED,
    )
    table("calibration", [*rows, longer], ["shape", "layers", "tokens", "wall_s", "traced", "peak", "file"])
    if arguments.save:
        print(f"\nwritten to {write_results('calibration', [*records, *rows, longer, summary]).name}")
    assert growth < 32 << 20, f"{growth / 2**20:.0f} MiB more for each layer"
    assert default <= ALLOWED, f"{default / 2**30:.1f} GiB at the default text"
    return None


if __name__ == "__main__":
    main()
