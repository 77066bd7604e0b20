"""An engine of the cuda target without weights, for a published shape: what benchmarks serve with random weights.

    python bench/plan_engine.py llama-3.1-8b ENGINE [--sm 90] [--max-batch-size 256] [--max-num-tokens 8192]

Prints a JSON line with the seconds that each part of the build took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from shapes import SHAPES, make_config


def write_plan_engine(
    shape: str, out: Path, *, sm: str, dtype: str, max_batch_size: int, max_num_tokens: int, max_seq_len: int
) -> dict[str, float]:
    """Write the engine, replacing what is at `out`; return seconds by part."""
    begin = time.perf_counter()
    import torch

    from llmbuild.builder import sections
    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.options import Choices
    from llmbuild.builder.pipeline import optimize
    from llmbuild.builder.targets.base import CompileOptions, Limits
    from llmbuild.builder.targets.cuda.target import write_plans
    from llmbuild.engine.writer import EngineWriter
    from llmbuild.quantization.recipes import find_recipe

    seconds = {"import": time.perf_counter() - begin}

    def lap(name: str) -> None:
        seconds[name] = time.perf_counter() - begin - sum(seconds.values())

    with tempfile.TemporaryDirectory() as folder:
        make_config(shape).save_pretrained(folder)
        program = load_program(Path(folder), dtype=getattr(torch, dtype), dry=True)
    lap("trace")
    optimize(program, find_recipe("none"))
    lap("passes")
    limits = Limits(max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, max_seq_len=max_seq_len)
    with EngineWriter(out, force=True) as writer:
        compiled, _ = write_plans(program, CompileOptions(limits, dtype, sm=sm), writer.directory)
        (writer.directory / "report.json").write_text("{}\n")
        lap("plan and kernels")
        writer.commit(
            model=sections.model(program.info),
            target=sections.target("cuda", compiled),
            precision=sections.precision(dtype, "none", compiled),
            limits=sections.limits(limits),
            kv_cache=sections.kv_cache(program, dtype, limits, None),
            build=sections.build(Choices("cuda", "none", find_recipe("none")), dtype, limits, sm),
        )
        lap("write")
    return {name: round(value, 2) for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--sm", default="90")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--max-seq-len", type=int, default=8704)
    arguments = vars(parser.parse_args())
    print(json.dumps(write_plan_engine(arguments.pop("shape"), arguments.pop("out"), **arguments)))


if __name__ == "__main__":
    main()
