"""The target `tensorrt-rtx`: an engine for the GPUs of workstations, built on a machine without one.

What it leaves in the engine directory:

    plan/model.onnx            the graph that was parsed, without weights: to be read, and run through onnxruntime
    plan/tensorrt_rtx.engine   the engine, weights inside, with code for all GPUs asked for
    plan/layers.json           its layers after fusion, with the graph's nodes that they came from, profiles, memory
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from torch import fx

from llmbuild.builder.ir import Program
from llmbuild.builder.targets.base import CompiledTarget, CompileOptions, Limits
from llmbuild.builder.targets.tensorrt import builder_options
from llmbuild.builder.targets.tensorrt.capabilities import RTX
from llmbuild.builder.targets.tensorrt.graph import MODEL, WEIGHTS, lower, write_model
from llmbuild.builder.targets.tensorrt.layers import layers, memory
from llmbuild.builder.targets.tensorrt.lower.table import rules, why_not
from llmbuild.builder.targets.tensorrt.profiles import profiles
from llmbuild.builder.targets.tensorrt.running import (
    LAYERS,
    check_memory,
    input_shapes,
    kept_small,
    run_builder,
    uses_float8,
    write_listing,
)

ENGINE = "plan/tensorrt_rtx.engine"


class RtxTarget:
    """See the module."""

    name = RTX.target
    dtypes = ("bfloat16", "float16", "float32")
    kv_caches: tuple[str, ...] = ()

    def probe(self) -> str | None:
        return RTX.problem()

    def supports(self, node: fx.Node) -> str | None:
        return why_not(node, rules(paged=False))

    def compile(self, program: Program, options: CompileOptions, directory: Path) -> CompiledTarget:
        sms = RTX.default_sms if options.sm is None else RTX.parse_sms(options.sm)
        asked = builder_options.parse(options.builder_options)
        RTX.check_types(sms, options.dtype, float8=uses_float8(program))
        limits = slot_limits(options.limits)
        emitter = lower(program, limits, target=self.name, paged=False)
        program.rewrites.append(kept_small(program, options.dtype))
        write_model(emitter.model(program.info.name), directory / MODEL)
        emitter.weights.write(directory / WEIGHTS, options.progress)
        weight_bytes = emitter.weights.bytes_by_storage()
        check_memory(sum(weight_bytes.values()))
        shapes = profiles(input_shapes(emitter), limits, asked.prefill_batch)
        order = {
            "module": RTX.module,
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
        write_listing(listing, directory)
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
