"""Options of TensorRT's builder, under the names that trtexec has: `--builder-option NAME=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmbuild.errors import ConfigError, UnsupportedError, nearest
from llmbuild.units import parse_size

VERBOSITIES = ("none", "layer_names_only", "detailed")
TILINGS = ("none", "fast", "moderate", "full")
ATTENTIONS = ("plugin", "stored")
OPTION = "--builder-option"

# What trtexec has too and a target cannot do, each with the reason.
NOT_RTX = {
    "timingCacheFile": "tensorrt-rtx times nothing while it builds; kernels are chosen on the GPU that runs the engine",
    "stripWeights": "tensorrt-rtx strips an engine of its weights only with the GPU at hand that it is for",
    "refit": "tensorrt-rtx makes refittable engines only with the GPU at hand that they are for",
    "attention": "tensorrt-rtx takes no plugins: attention is made of its own layers",
    "versionCompatible": "the lean runtime that such engines carry is not part of tensorrt-rtx",
    "hardwareCompatibilityLevel": "name the GPUs with --sm: one engine holds code for all of them",
}
NOT_TENSORRT = {
    "versionCompatible": "the lean runtime that such engines carry takes no plugin, which attention is",
    "hardwareCompatibilityLevel": "the plugin's kernels are for the one GPU that the engine is built on",
    "prefillBatchSize": "prompts are packed, not padded: --max-num-tokens is what bounds them",
}
NOT_HERE = {"tensorrt": NOT_TENSORRT, "tensorrt-rtx": NOT_RTX}


@dataclass(frozen=True)
class BuilderOptions:
    """What the builder is told. None leaves the choice to TensorRT.

    Args:
        optimization_level: 0 to 5.
        verbosity: What an engine tells about its layers; `llmbuild inspect` shows it.
        workspace: Most bytes of scratch memory.
        max_aux_streams: Streams beside the main one.
        tiling: How hard tiling across layers is looked for.
        weight_streaming: Whether weights may stay in host memory while the engine runs.
        tf32: Whether float32 products may round their inputs.
        sparsity: Whether 2:4 sparse weights are looked for.
        prefill_batch: Most prompts in one run. tensorrt-rtx only.
        strip_weights: Whether the engine is written without weights, which lie beside it and are put back when it is
            loaded. tensorrt only.
        refit: Whether other weights may be put into the engine. tensorrt only.
        attention: "plugin": one node a layer, launched by Python; "stored": nodes whose kernels TensorRT stores in the
            engine and launches by itself. tensorrt only.
        timing_cache: File of the times of kernels: read if it exists, and written. tensorrt only.
    """

    optimization_level: int | None = None
    verbosity: str = "detailed"
    workspace: int | None = None
    max_aux_streams: int | None = None
    tiling: str | None = None
    weight_streaming: bool = False
    tf32: bool = True
    sparsity: bool = False
    prefill_batch: int = 4
    strip_weights: bool = False
    refit: bool = False
    attention: str = "plugin"
    timing_cache: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what an engine records: all but files of this machine."""
        return {name: value for name, value in asdict(self).items() if name != "timing_cache"}


def parse(options: Sequence[str], target: str = "tensorrt-rtx") -> BuilderOptions:
    """Read "NAME=VALUE" each; "NAME" alone switches something on.

    Raises:
        ConfigError: A name or value is unknown, or a name is given twice.
        UnsupportedError: trtexec knows the name, the target cannot do it.
    """
    result, seen = BuilderOptions(), set()
    refused = NOT_HERE[target]
    for text in options:
        name, _, value = text.partition("=")
        if name in refused:
            raise UnsupportedError(f"{name}: {refused[name]}", where=OPTION, hint="leave it out")
        if name not in READERS:
            known = [each for each in READERS if each not in refused]
            raise ConfigError(f"unknown builder option {name!r}", where=OPTION, hint=nearest(name, known))
        if name in seen:
            raise ConfigError(f"the builder option {name} is given twice", where=OPTION, hint="give it once")
        seen.add(name)
        field, read = READERS[name]
        result = replace(result, **{field: read(name, value)})
    return result


def number(least: int, most: int) -> Any:
    def read(name: str, value: str) -> int:
        if not value.isdecimal() or not least <= int(value) <= most:
            raise wrong(name, value, f"a number from {least} to {most}")
        return int(value)

    return read


def one_of(allowed: Sequence[str]) -> Any:
    def read(name: str, value: str) -> str:
        if value not in allowed:
            raise wrong(name, value, " or ".join(allowed))
        return value

    return read


def switch(on: bool) -> Any:
    """`on`: what the name alone means."""

    def read(name: str, value: str) -> bool:
        if value not in ("", "true", "false"):
            raise wrong(name, value, f"true or false, or {name} alone")
        return on if value != "false" else not on

    return read


def sparse(name: str, value: str) -> bool:
    if value not in ("enable", "disable"):
        raise wrong(name, value, "enable or disable")
    return value == "enable"


def workspace(name: str, value: str) -> int:
    """trtexec's "workspace:SIZE"; a bare number is in MiB there."""
    pool, _, size = value.partition(":")
    if pool != "workspace":
        raise wrong(name, value, "workspace:SIZE, such as workspace:2GiB")
    try:
        return int(size) << 20 if size.isdecimal() else parse_size(size)
    except ValueError as error:
        raise wrong(name, value, f"workspace:SIZE ({error})") from None


def file(name: str, value: str) -> str:
    if not value or not Path(value).absolute().parent.is_dir():
        raise wrong(name, value, "a file in a folder that exists")
    return str(Path(value).absolute())


def wrong(name: str, value: str, allowed: str) -> ConfigError:
    return ConfigError(f"the builder option {name} is {value!r}", where=OPTION, hint=f"allowed: {allowed}")


READERS: dict[str, tuple[str, Any]] = {
    "builderOptimizationLevel": ("optimization_level", number(0, 5)),
    "profilingVerbosity": ("verbosity", one_of(VERBOSITIES)),
    "memPoolSize": ("workspace", workspace),
    "maxAuxStreams": ("max_aux_streams", number(0, 64)),
    "tilingOptimizationLevel": ("tiling", one_of(TILINGS)),
    "allowWeightStreaming": ("weight_streaming", switch(True)),
    "noTF32": ("tf32", switch(False)),
    "sparsity": ("sparsity", sparse),
    "prefillBatchSize": ("prefill_batch", number(1, 1024)),
    "stripWeights": ("strip_weights", switch(True)),
    "refit": ("refit", switch(True)),
    "attention": ("attention", one_of(ATTENTIONS)),
    "timingCacheFile": ("timing_cache", file),
}
