"""The target `tensorrt-rtx`: an engine for the GPUs of workstations, built on a machine without one.

What it leaves in the engine directory:

    plan/model.onnx            the graph that was parsed, without weights: to be read, and run through onnxruntime
    plan/tensorrt_rtx.engine   the engine, weights inside, with code for all GPUs asked for
    plan/layers.json           its layers after fusion, with the graph's nodes that they came from, profiles, memory
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import fx

from llmbuild.builder.ir import Program, Rewrite, source_line
from llmbuild.builder.targets.base import CompiledTarget, CompileOptions, Limits
from llmbuild.builder.targets.onnx_graph.blocks import blocks_of
from llmbuild.builder.targets.onnx_graph.emitter import Emitter
from llmbuild.builder.targets.onnx_graph.rule import is_size
from llmbuild.builder.targets.tensorrt import builder_options
from llmbuild.builder.targets.tensorrt.capabilities import RTX
from llmbuild.builder.targets.tensorrt.graph import MODEL, WEIGHTS, lower, write_model
from llmbuild.builder.targets.tensorrt.layers import layers, memory
from llmbuild.builder.targets.tensorrt.lower.linear import quantized_weights, why_wide
from llmbuild.builder.targets.tensorrt.lower.table import rules, why_not
from llmbuild.builder.targets.tensorrt.profiles import profiles
from llmbuild.errors import ConfigError, LLMBuildError, UnsupportedError
from llmbuild.units import human_size

ENGINE, LAYERS = "plan/tensorrt_rtx.engine", "plan/layers.json"
# Of the process that builds, in weights: they are mapped, held by the network, folded, and written.
BUILD_MEMORY = 3
PROCESS = "llmbuild.builder.targets.tensorrt.build_process"
KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "VIRTUAL_ENV", "SYSTEMROOT")


class RtxTarget:
    """See the module."""

    name = RTX.target
    dtypes = ("bfloat16", "float16", "float32")
    kv_caches: tuple[str, ...] = ()

    def probe(self) -> str | None:
        return RTX.problem()

    def supports(self, node: fx.Node) -> str | None:
        if node.op != "call_function" or is_size(node):
            return None
        return why_not(node, rules(paged=False))

    def compile(self, program: Program, options: CompileOptions, directory: Path) -> CompiledTarget:
        sms = RTX.default_sms if options.sm is None else RTX.parse_sms(options.sm)
        asked = builder_options.parse(options.builder_options)
        RTX.check_types(sms, options.dtype, float8=uses_float8(program))
        limits = slot_limits(options.limits)
        emitter = lower(program, limits, target=self.name, paged=False)
        program.rewrites.append(kept_small(program, options.dtype))
        write_model(emitter, directory / MODEL)
        emitter.weights.write(directory / WEIGHTS, options.progress)
        weight_bytes = emitter.weights.bytes_by_storage()
        check_memory(sum(weight_bytes.values()))
        shapes = profiles(input_shapes(emitter), limits, asked.prefill_batch)
        order = {
            "model": MODEL,
            "weights": WEIGHTS,
            "engine": ENGINE,
            "initializers": sorted(emitter.weights.entries),
            "profiles": shapes,
            "sms": list(sms),
            "options": asked.to_dict(),
        }
        result = run_builder(order, directory, program)
        (directory / WEIGHTS).unlink()
        (directory / WEIGHTS).parent.rmdir()
        listing = {"layers": layers(result["log"]), "memory": memory(result["log"]), "profiles": shapes}
        listing["network"] = result["network"]
        text = json.dumps(listing, indent=1, sort_keys=True) + "\n"
        (directory / LAYERS).write_text(text, encoding="utf-8")
        toolchain = {name: importlib.metadata.version(name) for name in ("onnx", RTX.package, "torch", "transformers")}
        section = {
            "sms": list(sms),
            "known_sms": list(RTX.sms),
            "engine": ENGINE,
            "model": MODEL,
            "layers": LAYERS,
            "slots": limits.max_batch_size,
            "prefill_batch": min(asked.prefill_batch, limits.max_batch_size),
            "options": asked.to_dict(),
        }
        requires = {RTX.package: f"=={toolchain[RTX.package]}"}
        return CompiledTarget(requires, toolchain, section, weight_bytes, block_size=limits.block_size)


def slot_limits(limits: Limits) -> Limits:
    """A block of the cache is a slot: it holds a whole sequence."""
    return Limits(limits.max_batch_size, limits.max_num_tokens, limits.max_seq_len, block_size=limits.max_seq_len)


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


def run_builder(order: dict[str, Any], directory: Path, program: Program) -> dict[str, Any]:
    """Run the process that builds, in `directory`.

    Raises:
        UnsupportedError: The parser refuses nodes; all are named.
        LLMBuildError: The builder fails or dies.
    """
    (directory / ENGINE).parent.mkdir(parents=True, exist_ok=True)
    environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
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
            hint="report it with the model's name; --target cuda and --target cpu do not go through TensorRT",
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
