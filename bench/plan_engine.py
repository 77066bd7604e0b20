"""An engine of the cuda target without weights, for a published shape: what benchmarks serve with random weights.

    python bench/plan_engine.py llama-3.1-8b ENGINE [--sm 90] [--quant fp8] [--kv-cache-dtype fp8]

--weights writes a file of noise for them, to time a start from disk. Prints a JSON line with the seconds that each part
of the build took.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shapes import SHAPES, make_config

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from llmbuild.builder.targets.weight_file import WeightFile
    from llmbuild.builder.weights import WeightExpr


def write_plan_engine(
    shape: str,
    out: Path,
    *,
    sm: str,
    dtype: str,
    quant: str,
    kv_cache_dtype: str,
    max_batch_size: int,
    max_num_tokens: int,
    max_seq_len: int,
    weights: bool,
) -> dict[str, float]:
    """Write the engine, replacing what is at `out`; return seconds by part."""
    begin = time.perf_counter()
    import torch

    from llmbuild.builder import sections
    from llmbuild.builder.calibration import NothingKnown
    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.options import Choices
    from llmbuild.builder.pipeline import optimize
    from llmbuild.builder.targets.base import CompileOptions, Limits
    from llmbuild.builder.targets.cuda.target import WEIGHTS, write_plans
    from llmbuild.engine.writer import EngineWriter
    from llmbuild.quantization.recipes import KvCache, find_recipe

    seconds = {"import": time.perf_counter() - begin}

    def lap(name: str) -> None:
        seconds[name] = time.perf_counter() - begin - sum(seconds.values())

    with tempfile.TemporaryDirectory() as folder:
        make_config(shape).save_pretrained(folder)
        program = load_program(Path(folder), dtype=getattr(torch, dtype), dry=True)
    lap("trace")
    cache = None if kv_cache_dtype == "auto" else KvCache(kv_cache_dtype)  # type: ignore[arg-type]
    recipe = replace(find_recipe(quant), kv_cache=cache)
    optimize(program, recipe, calibrate=lambda *_: NothingKnown())
    lap("passes")
    limits = Limits(max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, max_seq_len=max_seq_len)
    with EngineWriter(out, force=True) as writer:
        compiled, expressions = write_plans(program, CompileOptions(limits, dtype, sm=sm), writer.directory)
        (writer.directory / "report.json").write_text("{}\n")
        lap("plan and kernels")
        if weights:
            noise_file(expressions).write(writer.directory / WEIGHTS)
            lap("noise")
        writer.commit(
            model=sections.model(program.info),
            target=sections.target("cuda", compiled),
            precision=sections.precision(dtype, quant, compiled),
            limits=sections.limits(limits),
            kv_cache=sections.kv_cache(program, dtype, limits, cache),
            build=sections.build(Choices("cuda", quant, recipe), dtype, limits, sm),
        )
        lap("write")
    return {name: round(value, 2) for name, value in seconds.items()}


def noise_file(expressions: dict[str, WeightExpr]) -> WeightFile:
    """Return a weight file of the weights' shapes and types. Numbers of 8 bits are any that are finite."""
    import torch

    from llmbuild.builder.targets.weight_file import WeightFile, plain_entry

    draw = torch.Generator().manual_seed(0)
    floats = torch.randn(1 << 24, generator=draw) * 0.02
    small = torch.randint(0, 0x60, (1 << 24,), generator=draw, dtype=torch.uint8)

    def pieces(dtype: torch.dtype, carrier: np.dtype, count: int) -> Iterator[npt.NDArray]:
        bits = small if dtype.itemsize == 1 or not dtype.is_floating_point else floats.to(dtype)
        block = bits.view(torch.uint8).numpy().view(carrier)
        for begin in range(0, count, len(block)):
            yield block[: min(len(block), count - begin)]

    file = WeightFile()
    for name, expression in expressions.items():
        entry = plain_entry(expression)
        count = math.prod(entry.shape)
        file.add(name, replace(entry, origin=None, pieces=partial(pieces, expression.dtype, entry.dtype, count)))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--sm", default="90")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quant", default="none", help="name of a recipe")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "int8"), default="auto")
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--max-seq-len", type=int, default=8704)
    parser.add_argument("--weights", action="store_true")
    arguments = vars(parser.parse_args())
    print(json.dumps(write_plan_engine(arguments.pop("shape"), arguments.pop("out"), **arguments)))


if __name__ == "__main__":
    main()
