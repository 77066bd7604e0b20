"""The process that runs TensorRT's builder: `python -m llmbuild.builder.targets.tensorrt.build_process`.

It reads one JSON object on stdin, works in the current directory and writes the engine there; stdout gets one JSON
object, what happened. A process of its own for three reasons: a crash of the builder becomes a message; torch is not in
its memory; and TensorRT orders what it writes by address, so that the same bytes come out only where addresses are the
same. Hence one thread, no randomised addresses where the system allows that, relative paths, and nothing that moves
what Python allocates: the parent fixes hashes and environment, and no compiled module is read or written.

The full TensorRT differs in little: it builds for the GPU that is there, by timing; its networks hold plugins, whose
kernels lie in files until then; and what it made is read from the engine itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from llmbuild.engine.mapped import MappedWeights

if TYPE_CHECKING:  # `build` puts tensorrt or tensorrt_rtx in its place
    import tensorrt as trt

ADDR_NO_RANDOMIZE = 0x0040000
AGAIN = "LLMBUILD_ADDRESSES"  # set once the process has tried to fix its addresses
NO_CACHE = f"pycache_prefix={os.devnull}/none"  # a folder that cannot be there


def fix_addresses() -> None:
    """Start this process again without address randomisation; go on as it is where that is not allowed."""
    if AGAIN in os.environ:
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "personality"):
        return
    now = libc.personality(0xFFFFFFFF)
    if now == -1 or libc.personality(now | ADDR_NO_RANDOMIZE) == -1:
        return
    environment = {**os.environ, AGAIN: "fixed"}
    module = "llmbuild.builder.targets.tensorrt.build_process"
    os.execve(sys.executable, [sys.executable, "-B", "-X", NO_CACHE, "-m", module], environment)


def main() -> None:
    fix_addresses()
    order = json.load(sys.stdin)
    print(json.dumps(build(order)))


def build(order: dict[str, Any]) -> dict[str, Any]:
    """Build what `order` says.

    Returns:
        {"errors": [...]}, {"refused": [[node, reason], ...]}, or {"log": lines, "network": layers} and, of the full
        TensorRT, "inspector" and "activations" (see `opened`).
    """
    globals()["trt"] = importlib.import_module(order["module"])
    log = make_log()
    full = order["module"] == "tensorrt"
    if full:
        from llmbuild.builder.targets.tensorrt.opened import allow_refitting, opened

        provide_kernels(order["kernels"], stored=order["options"]["attention"] == "stored")
    builder = trt.Builder(log)
    if not full:
        builder.max_threads = 1
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    weights = MappedWeights(Path(order["weights"]))
    parser.load_model_proto(Path(order["model"]).read_bytes())
    for name in order["initializers"]:
        place = weights.place(name)
        if not parser.load_initializer(name, place.address, place.size):
            return {"errors": [f"the initializer {name} was not taken", *log.errors]}
    if not parser.parse_model_proto():
        found = [parser.get_error(at) for at in range(parser.num_errors)]
        return {"errors": log.errors, "refused": [[error.node_name(), error.desc()] for error in found]}
    config = configuration(builder, order)
    keep_times = timing_cache(config, order.get("timing_cache"))
    if full and (unknown := allow_refitting(config, network, order)):
        return {"errors": [f"TensorRT knows no weight {unknown[0]!r} that could be replaced", *log.errors]}
    with Path(order["engine"]).open("wb") as file:
        if not builder.build_serialized_network_to_stream(network, config, writer(file)):
            return {"errors": log.errors or ["the builder gave no reason"]}
    keep_times()
    result = {"log": log.kept, "network": network_layers(network)}
    return {**result, **opened(log, order, weights)} if full else result


def make_log() -> Any:
    class Log(trt.ILogger):
        """Keeps errors, and of the rest what tells about layers and memory."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.kept: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            elif message.startswith(("Layers:", "Total Activation Memory", "Total Weights Memory")):
                self.kept.append(message)

        def reason(self) -> str:
            return "; ".join(self.errors[-3:]) or "TensorRT gives no reason"

    return Log()


def provide_kernels(files: list[list[str]], *, stored: bool) -> None:
    """Register the plugins, and keep the kernels that nodes name.

    Args:
        files: Program and pack of each set; of kernels that the engine stores one file each.
    """
    from llmbuild.plugins.tensorrt import kernel_store, register
    from llmbuild.plugins.tensorrt.program import KernelSet
    from llmbuild.plugins.tensorrt.registry import register_stored
    from llmbuild.plugins.tensorrt.stored import StoredKernel

    if stored:
        register_stored()
        for (kernel,) in files:
            kernel_store.provide(StoredKernel.model_validate_json(Path(kernel).read_bytes()))
        return
    register()
    for program, pack in files:
        kernel_store.provide(KernelSet(Path(program).read_bytes(), Path(pack).read_bytes()))


def timing_cache(config: trt.IBuilderConfig, path: str | None) -> Callable[[], None]:
    """Give the builder the times of earlier builds; return what writes them again."""
    if path is None:
        return lambda: None
    file = Path(path)
    cache = config.create_timing_cache(file.read_bytes() if file.exists() else b"")
    config.set_timing_cache(cache, False)

    def keep() -> None:
        times: Any = config.get_timing_cache().serialize()
        file.write_bytes(bytes(times))

    return keep


def writer(file: BinaryIO) -> trt.IStreamWriter:
    class Writer(trt.IStreamWriter):
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: Any, size: int = 0) -> int:  # called with the data alone
            written: int = file.write(data)
            return written

    return Writer()


def configuration(builder: trt.Builder, order: dict[str, Any]) -> trt.IBuilderConfig:
    """Return the builder's configuration: profiles, GPUs and options."""
    config = builder.create_builder_config()
    for shapes in order["profiles"]:
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in shapes.items():
            profile.set_shape(name, least, usual, most)
        config.add_optimization_profile(profile)
    if order["module"] == "tensorrt":  # a pool comes out of its plugin in the memory in which it went in
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    else:
        choose_gpus(config, order["sms"])
    options = order["options"]
    config.profiling_verbosity = getattr(trt.ProfilingVerbosity, options["verbosity"].upper())
    if options["optimization_level"] is not None:
        config.builder_optimization_level = options["optimization_level"]
    if options["workspace"] is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options["workspace"])
    if options["max_aux_streams"] is not None:
        config.max_aux_streams = options["max_aux_streams"]
    if options["tiling"] is not None:
        config.tiling_optimization_level = getattr(trt.TilingOptimizationLevel, options["tiling"].upper())
    if options["weight_streaming"]:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if not options["tf32"]:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options["sparsity"]:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    return config


def choose_gpus(config: Any, sms: list[int]) -> None:
    """What tensorrt-rtx alone can: build for GPUs that are not there."""
    rtx: Any = trt
    config.num_compute_capabilities = len(sms)
    for at, sm in enumerate(sms):
        config.set_compute_capability(getattr(rtx.ComputeCapability, f"SM{sm}"), at)


def network_layers(network: trt.INetworkDefinition) -> list[list[str]]:
    """Return (name, kind) of every layer before fusion."""
    layers = (network.get_layer(at) for at in range(network.num_layers))
    return [[layer.name, str(layer.type).removeprefix("LayerType.")] for layer in layers]


if __name__ == "__main__":
    main()
