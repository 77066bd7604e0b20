"""The cpu target: FX graph → ONNX → onnxruntime, with native operators where they can be compiled.

What it leaves in the engine:

    plan/model.onnx            the graph, without weights
    plan/native.so             our operators (linears over blocks, paged attention), if a compiler was found
    weights/cpu.safetensors    every weight, in the layout that its operator reads
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import fx

from llmbuild.builder.ir import INPUT_NAMES, Program, raise_unsupported
from llmbuild.builder.passes.edit import arg, is_call, size
from llmbuild.builder.targets.base import CompiledTarget, CompileOptions
from llmbuild.builder.targets.cpu import native_library
from llmbuild.builder.targets.cpu.lower.attention_paged import why_not_paged, why_not_width
from llmbuild.builder.targets.cpu.lower.table import rules, why_not
from llmbuild.builder.targets.cpu.packed import packed
from llmbuild.builder.targets.onnx_graph.emitter import CONTRIB, NATIVE, ONNX_TYPES, Dialect, Emitter
from llmbuild.builder.targets.onnx_graph.rule import is_size
from llmbuild.errors import ConfigError, UnsupportedError

NEEDS_NATIVE = "needs the native operators"
MODEL, LIBRARY, WEIGHTS = "plan/model.onnx", "plan/native.so", "weights/cpu.safetensors"
LOGITS = "logits"


class CpuTarget:
    """See the module.

    Args:
        native: Whether to use native operators; None: if a compiler is found.
    """

    name = "cpu"
    dtypes = ("float32",)
    kv_caches: tuple[str, ...] = ("int8",)  # with native operators

    def __init__(self, native: bool | None = None) -> None:
        self.native = native

    def probe(self) -> str | None:
        if importlib.util.find_spec("onnx") is None:
            return "the package onnx is missing: pip install 'llmbuild[build]'"
        return None

    def supports(self, node: fx.Node) -> str | None:
        if node.op != "call_function" or is_size(node):
            return None
        if rounds_cache(node):
            return why_no_int8_cache(node)
        return why_not(node, rules(native=False, paged=False))

    def compile(self, program: Program, options: CompileOptions, directory: Path) -> CompiledTarget:
        if options.dtype != "float32":
            raise ConfigError(
                f"the cpu target computes in float32, not {options.dtype}",
                where="--dtype",
                hint="use --dtype float32; --quant int8-wo or int4-wo make weights smaller",
            )
        compiler = None if self.native is False else native_library.find_compiler()
        if self.native and compiler is None:
            raise ConfigError("no C++ compiler was found for the native operators", hint="install g++, or ziglang")
        why_dense = why_not_paged(program.kv_layers)
        native, paged = compiler is not None, compiler is not None and why_dense is None
        if not paged and any(map(rounds_cache, program.graph.nodes)):
            raise UnsupportedError(
                f"an int8 KV cache {NEEDS_NATIVE}",
                where=f"--kv-cache-dtype: {why_dense or 'no C++ compiler was found'}",
                hint="leave the option out, or install g++, or ziglang",
            )
        raise_unsupported(self.name, unsupported(program.graph, native=native, paged=paged))
        if native:
            program.rewrites.append(packed(program, attention=paged))
            if why_dense is not None:
                program.rewrites[-1].declined.append(f"attention in standard operators: {why_dense}")
        emitter = lower(program, options, native=native, paged=paged)

        write_model(emitter, program, directory / MODEL)
        if compiler is not None:
            native_library.compile_library(compiler, directory / LIBRARY)
        emitter.weights.write(directory / WEIGHTS, options.progress)
        toolchain = {package: importlib.metadata.version(package) for package in ("onnx", "torch", "transformers")}
        if compiler is not None:
            toolchain["c++"] = compiler.version
        return CompiledTarget(
            requires={"onnxruntime": ">=1.32,<2"},
            toolchain=toolchain,
            section=section(emitter, native=native, paged=paged),
            weight_bytes=emitter.weights.bytes_by_storage(),
        )


def rounds_cache(node: fx.Node) -> bool:
    """Whether a node is part of an int8 KV cache, which attention takes over."""
    producer = node.args[0] if is_call(node, operator.getitem) else node
    return is_call(producer, torch.ops.llmbuild.cache_int8.default)


def why_no_int8_cache(node: fx.Node) -> str | None:
    width = int(size(arg(arg(node, 0), 0) if is_call(node, operator.getitem) else arg(node, 0))[-1])
    why = why_not_width(width) or ("" if native_library.find_compiler() else "no C++ compiler was found")
    return f"an int8 KV cache {NEEDS_NATIVE}: {why}" if why else None


def unsupported(graph: fx.Graph, *, native: bool, paged: bool) -> list[tuple[fx.Node, str]]:
    """Return every node that cannot be lowered, with the reason."""
    table = rules(native=native, paged=paged)
    calls = (
        node for node in graph.nodes if node.op == "call_function" and not is_size(node) and not rounds_cache(node)
    )
    reasons = ((node, why_not(node, table)) for node in calls)
    return [(node, reason) for node, reason in reasons if reason is not None]


def lower(program: Program, options: CompileOptions, *, native: bool, paged: bool) -> Emitter:
    """Lower all nodes in order and return the emitter that holds the graph."""
    table = rules(native=native, paged=paged)
    domains = (CONTRIB, NATIVE) if native else (CONTRIB,)
    e = Emitter(program, options.limits, Dialect(23, 10, domains, Path(WEIGHTS).name))
    for node in program.graph.nodes:
        e.scope = node.name
        if node.op == "placeholder" and node.name in INPUT_NAMES:
            dtype = ONNX_TYPES[node.meta["val"].dtype]
            e.values[node] = e.add_input(node.name, dtype, ["L" if node.name == "logits_indices" else "T"])
        elif node.op == "call_function" and not is_size(node) and node not in e.values:
            e.values[node] = table[node.target].emit(e, node)
        elif node.op == "output":
            logits = node.args[0]
            e.scope = LOGITS
            name = e.op("Identity", e.tensor(logits))
            e.rename(name, LOGITS)
            e.add_output(LOGITS, onnx.TensorProto.FLOAT, ["L", int(logits.meta["val"].shape[-1])])
    return e


def write_model(emitter: Emitter, program: Program, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(emitter.model(program.info.name).SerializeToString(deterministic=True))


def section(emitter: Emitter, *, native: bool, paged: bool) -> dict[str, Any]:
    """What the executor needs besides the files. Its reader is runtime/executors/cpu.py."""
    cpu = {"machine": native_library.MACHINE, "features": list(native_library.FEATURES)} if native else None
    return {
        "model": MODEL,
        "weights": WEIGHTS,
        "native": None if cpu is None else {"library": LIBRARY, **cpu},
        "attention": "paged" if paged else "dense",
    }
