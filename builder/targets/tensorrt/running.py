"""What both TensorRT targets do around the vendor's builder: checks before it, its process, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.targets.onnx_graph.blocks import blocks_of
from llmbuild.builder.targets.onnx_graph.emitter import Emitter
from llmbuild.builder.targets.tensorrt.lower.linear import quantized_weights, why_wide
from llmbuild.errors import ConfigError, LLMBuildError, UnsupportedError
from llmbuild.units import human_size

LAYERS = "plan/layers.json"
# Of the process that builds, in weights: they are mapped, held by the network, folded, and written.
BUILD_MEMORY = 3
PROCESS = "llmbuild.builder.targets.tensorrt.build_process"
KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "VIRTUAL_ENV", "SYSTEMROOT")
GPU_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")  # which GPU the builder finds first


def uses_float8(program: Program) -> bool:
    import torch

    return any(weight.dtype is torch.float8_e4m3fn for weight in program.weights.values())


def kept_small(program: Program, dtype: str) -> Rewrite:
    """Which quantized weights the engine holds in their bits, and which not, for the report."""
    log = Rewrite("tensorrt_weights", 0)
    reasons: dict[str, int] = {}
    for operands in quantized_weights(program):
        why = why_wide(blocks_of(program, *operands))
        if why is None:
            log.count += 1
        else:
            reasons[why] = reasons.get(why, 0) + 1
    log.declined = [f"{count} weight(s) stored in {dtype}: {why}" for why, count in sorted(reasons.items())]
    return log


def input_shapes(emitter: Emitter) -> dict[str, list[int | str]]:
    return {
        name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for name, value in emitter.inputs.items()
    }


def check_memory(weights: int) -> None:
    """Raise ConfigError when the process that builds would not find the memory for so many bytes of weights."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return
    if weights * BUILD_MEMORY > free:
        raise ConfigError(
            f"TensorRT needs about {human_size(weights * BUILD_MEMORY)} of memory to build an engine with "
            f"{human_size(weights)} of weights, and {human_size(free)} are free",
            hint="build on a larger machine, or choose --quant int4-wo-g128 or int8-wo-channel",
        )


def write_listing(listing: dict[str, Any], directory: Path) -> None:
    text = json.dumps(listing, indent=1, sort_keys=True) + "\n"
    (directory / LAYERS).write_text(text, encoding="utf-8")


def run_builder(
    order: dict[str, Any], directory: Path, program: Program, *, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run the process that builds, in `directory`.

    also: variables of the environment that it gets besides the usual ones.

    Raises:
        UnsupportedError: The parser refuses nodes; all are named.
        LLMBuildError: The builder fails or dies.
    """
    (directory / order["engine"]).parent.mkdir(parents=True, exist_ok=True)
    environment = {name: os.environ[name] for name in (*KEPT_ENVIRONMENT, *also) if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", PROCESS],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        cwd=directory,
        env={**environment, "PYTHONHASHSEED": "0"},
        check=False,
    )
    if done.returncode != 0:
        killed = -done.returncode == signal.SIGKILL
        hint = "it was killed, as the system does when memory runs out: build on a larger machine" if killed else None
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else "it wrote nothing"
        raise LLMBuildError(f"TensorRT's builder ended with code {done.returncode}: {why}", hint=hint)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "refused" in result:
        raise refused(result["refused"], program)
    if "errors" in result:
        raise LLMBuildError(
            f"TensorRT cannot build this engine: {result['errors'][0]}",
            hint=result.get(
                "hint", "report it with the model's name; --target cuda and --target cpu do not go through TensorRT"
            ),
        )
    return result


def refused(problems: list[list[str]], program: Program) -> UnsupportedError:
    """One error that names every node that the parser refused, with the line of the model's code."""
    by_name = {node.name: node for node in program.graph.nodes}
    lines = []
    for name, reason in problems:
        node = by_name.get(name.split(".")[0])
        lines.append(f"  {name}: {reason}" + (f" [{source_line(node)}]" if node is not None else ""))
    return UnsupportedError(
        f"TensorRT's parser refuses {len(problems)} operator(s):\n" + "\n".join(lines),
        hint="choose another --target, or report the operators above",
    )
