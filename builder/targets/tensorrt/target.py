"""The target `tensorrt`: an engine of the full TensorRT, whose attention is a plugin: PagedAttention, in Python, or two
nodes whose kernels TensorRT stores (`attention=stored`).

It is built on the GPU that is to run it. What it leaves in the engine directory:

    plan/model.onnx         the graph that was parsed, without weights and without the plugin's kernels
    plan/tensorrt.engine    the engine: weights and the plugin's kernels inside
    weights/tensorrt.safetensors   with stripWeights: the weights, which are then not in the engine
    plan/layers.json        its layers after fusion, with the graph's nodes that they came from, profiles, memory, and
                            the fields of each plugin
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

from torch import fx

from llmbuild.builder.ir import Program
from llmbuild.builder.targets.base import CompiledTarget, CompileOptions
from llmbuild.builder.targets.tensorrt import builder_options
from llmbuild.builder.targets.tensorrt.capabilities import TENSORRT
from llmbuild.builder.targets.tensorrt.gpu_here import GpuHere, gpu_here
from llmbuild.builder.targets.tensorrt.graph import MODEL, WEIGHTS, add_constants, lower, write_model
from llmbuild.builder.targets.tensorrt.layers import inspected_layers
from llmbuild.builder.targets.tensorrt.lower.table import rules, why_not
from llmbuild.builder.targets.tensorrt.plugin_kernels import compile_kernels
from llmbuild.builder.targets.tensorrt.profiles import most_slots, paged_profiles
from llmbuild.builder.targets.tensorrt.running import (
    GPU_ENVIRONMENT,
    LAYERS,
    check_memory,
    input_shapes,
    kept_small,
    run_builder,
    uses_float8,
    write_listing,
)
from llmbuild.builder.targets.tensorrt.stored_kernels import compile_stored
from llmbuild.builder.targets.tensorrt.surgery import add_plugins, table_stride
from llmbuild.errors import ConfigError
from llmbuild.plugins.tensorrt import fields
from llmbuild.plugins.tensorrt import program as plugin_program
from llmbuild.plugins.tensorrt.form import STORED, PluginForm

ENGINE = "plan/tensorrt.engine"
KERNELS = "kernels"


class TensorRTTarget:
    """See the module."""

    name = TENSORRT.target
    dtypes = ("bfloat16", "float16", "float32")
    kv_caches: tuple[str, ...] = ()

    def probe(self) -> str | None:
        from llmbuild.builder.targets.cuda.aot import INSTALL, triton_problem

        problem = TENSORRT.problem()
        if problem is None and (problem := triton_problem()) is not None:
            problem = f"the plugin's kernels: {problem}: {INSTALL}"
        return problem

    def supports(self, node: fx.Node) -> str | None:
        return why_not(node, rules(paged=True))

    def compile(self, program: Program, options: CompileOptions, directory: Path) -> CompiledTarget:
        limits = options.limits
        asked = builder_options.parse(options.builder_options, self.name)
        gpu = check_gpu(gpu_here(), options.sm)
        TENSORRT.check_types((gpu.sm,), options.dtype, float8=uses_float8(program))
        emitter = lower(program, limits, target=self.name, paged=True)
        program.rewrites.append(kept_small(program, options.dtype))
        kernels = KernelFiles(directory, gpu)
        stored = asked.attention == "stored"
        model, forms = add_plugins(emitter.model(program.info.name), limits, kernels.compile, stored=stored)
        write_model(model, directory / MODEL)
        weight_bytes = emitter.weights.bytes_by_storage()
        initializers = sorted(emitter.weights.entries)
        if asked.strip_weights:
            add_constants(emitter.weights, model)
        emitter.weights.write(directory / WEIGHTS, options.progress)
        check_memory(sum(weight_bytes.values()))
        # Surgery made block_tables as wide as the limits say.
        inputs = input_shapes(emitter) | {"block_tables": ["B", table_stride(limits)]}
        shapes = paged_profiles(inputs, limits)
        order = {
            "module": TENSORRT.module,
            "model": MODEL,
            "weights": WEIGHTS,
            "engine": ENGINE,
            "initializers": initializers,
            "profiles": shapes,
            "options": asked.to_dict(),
            "kernels": kernels.files,
            "timing_cache": asked.timing_cache,
        }
        result = run_builder(order, directory, program, also=GPU_ENVIRONMENT)
        if not asked.strip_weights:
            shutil.rmtree((directory / WEIGHTS).parent)
        shutil.rmtree(directory / KERNELS)
        listing = {
            "layers": inspected_layers(result["inspector"]),
            "memory": {"activations": result["activations"], "weights": sum(weight_bytes.values())},
            "profiles": shapes,
            "network": result["network"],
            "stripped": result["refitted"],
            "plugins": {name: {"plugin": form.name} | fields.form_values(form) for name, form in forms.items()},
        }
        write_listing(listing, directory)
        packages = ("onnx", "onnx-graphsurgeon", TENSORRT.package, "torch", "transformers", "triton")
        toolchain = {name: importlib.metadata.version(name) for name in packages}
        section: dict[str, Any] = {
            "sm": gpu.sm,
            "gpu": gpu.name,
            # What this llmbuild has to know to run the engine: nothing where the kernels are in it.
            "plugin": None if stored else {"fields": fields.VERSION, "program": plugin_program.VERSION},
            "engine": ENGINE,
            "weights": WEIGHTS if asked.strip_weights else None,
            "model": MODEL,
            "layers": LAYERS,
            "table_stride": table_stride(limits),
            "most_slots": most_slots(inputs, limits),
            "options": asked.to_dict(),
        }
        requires = {TENSORRT.package: f"=={toolchain[TENSORRT.package]}"}
        return CompiledTarget(requires, toolchain, section, weight_bytes)


def check_gpu(gpu: GpuHere, asked: str | None) -> GpuHere:
    """Return the GPU.

    Raises:
        ConfigError: The plugin has no kernels for it, or it is none of those asked for.
    """
    where, known = f"GPU 0: {gpu.name}", ", ".join(map(str, TENSORRT.sms))
    if gpu.sm not in TENSORRT.sms:
        raise ConfigError(
            f"the plugin has no kernels for SM {gpu.sm}", where=where, hint=f"there are kernels for SM {known}"
        )
    if asked is not None and gpu.sm not in TENSORRT.parse_sms(asked):
        raise ConfigError(
            f"the GPU here is SM {gpu.sm}, and --sm asks for {asked}: TensorRT builds for the GPU that is there",
            where=where,
            hint="leave --sm out, build on the other machine, or set CUDA_VISIBLE_DEVICES",
        )
    return gpu


class KernelFiles:
    """Compiles the kernels of plugins for a GPU, into files that the process which builds reads.

    files: program and pack of each set, or the one file of a kernel that the engine stores; relative to `directory`.
    """

    def __init__(self, directory: Path, gpu: GpuHere) -> None:
        self._directory, self._gpu = directory, gpu
        self.files: list[list[str]] = []

    def compile(self, form: PluginForm) -> str:
        """Return the hash of a form's kernels."""
        if form.role in STORED:
            kernel = compile_stored(form, self._gpu.sm)
            self._write({"kernel": kernel.compact_json()})
            return kernel.digest
        kernels = compile_kernels(form, self._gpu.sm, processors=self._gpu.processors)
        self._write({"program": kernels.program, "pack": kernels.pack})
        return kernels.digest

    def _write(self, contents: dict[str, bytes]) -> None:
        (self._directory / KERNELS).mkdir(parents=True, exist_ok=True)
        names = {f"{KERNELS}/{len(self.files)}.{part}": content for part, content in contents.items()}
        for name, content in names.items():
            (self._directory / name).write_bytes(content)
        self.files.append(list(names))
