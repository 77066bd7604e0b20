"""What a build is asked for, and what it takes where it is not told; every such choice is said in words."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmbuild.errors import ConfigError, UnsupportedError, nearest
from llmbuild.units import parse_size

if TYPE_CHECKING:
    from llmbuild.builder.ir import ModelInfo
    from llmbuild.builder.targets.base import Limits, Target
    from llmbuild.quantization.recipes import KvCache, Recipe

DTYPES = ("float32", "bfloat16", "float16")

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_NUM_TOKENS = 512
BUILD_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "gguf")

# Recipes that are taken where none is given, in words.
KEPT = {
    "gguf": "the file's own blocks, kept as they are",
    "stored": "what the quantized checkpoint stores, kept as it is",
    "none": "no quantization",
}


@dataclass(frozen=True)
class BuildConfig:
    """What `llmbuild convert` is asked for. None leaves the choice to the build, which says what it took.

    Args:
        model: Hugging Face directory, or a `.gguf` file.
        output: The engine directory to write.
        target: "cpu", "cuda", "tensorrt" or "tensorrt-rtx"; None takes cpu.
        dtype: Computation dtype, "float32"; None takes the target's own.
        sm: Kinds of GPU to compile for, "80,90"; None compiles for all that are known, or the target's usual ones. Not
            with the cpu target; tensorrt builds for the GPU that is there alone, which must be one of them.
        builder_options: "NAME=VALUE" each, as trtexec names them. Only with the tensorrt and tensorrt-rtx targets.
        quant: Name of a precision recipe; None keeps a GGUF's blocks ("gguf") and what a quantized checkpoint stores
            ("stored"), and else does not quantize ("none").
        exclude: Patterns (`fnmatch`) over checkpoint names of weights that are not quantized.
        quant_layers: "PATTERN=RECIPE" each: weights whose checkpoint name matches follow that recipe's linears.
        quant_config: File of the three (`builder.quant_config`), in their place. It is read at once: then they hold
            what it says, and this is None.
        kv_cache_dtype: "fp8", "int8", or the computation dtype by name; None or "auto" takes what the checkpoint
            describes, else the computation dtype.
        calibration: File of statistics for recipes that need calibration: read if it exists, else written. None keeps
            none.
        calibration_text: What is run to calibrate: UTF-8 text, or .jsonl of objects with a text. None: documentation
            of the installed Python.
        calibration_tokens: Most tokens of it; None takes 32768.
        max_batch_size: Most sequences in one step.
        max_num_tokens: Most tokens in one step, decode and prefill together; at least max_batch_size.
        max_seq_len: Most tokens of one sequence, prompt and output; at most what the model was made for.
        force: Replace an engine that exists at `output`.
        trust_remote_code: Run Python code that comes with the model directory.
        max_memory: Bytes, or a size such as "4GiB": the build stops before it reads weights when it would need more.
            It changes nothing else, and is not written into the engine.
        ignore_config_keys: Keys of config.json that transformers does not know, and that you know to change nothing.
        max_kl: The build fails with AccuracyError when the mean KL divergence from the unquantized model is above, in
            nats. This and each of the following has the accuracy measured, which goes into the engine's report.
        max_ppl_increase: Likewise when the perplexity rises by a larger share; 0.01 is 1 %.
        min_top1: Likewise when fewer tokens than this share, 0 to 1, have the same largest logit.
        accuracy_text: UTF-8 text, or .jsonl of objects with a text. None: documentation of the installed Python.
        accuracy_tokens: Most tokens of it; None takes 2048.

    Raises:
        ConfigError: A limit is not positive, max_memory is not a size, a threshold is out of range, or quant_config
            cannot be read.
    """

    model: Path
    output: Path
    target: str | None = None
    dtype: str | None = None
    sm: str | None = None
    builder_options: tuple[str, ...] = ()
    quant: str | None = None
    exclude: tuple[str, ...] = ()
    quant_layers: tuple[str, ...] = ()
    quant_config: Path | None = None
    kv_cache_dtype: str | None = None
    calibration: Path | None = None
    calibration_text: Path | None = None
    calibration_tokens: int | None = None
    max_batch_size: int = 16
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    force: bool = False
    trust_remote_code: bool = False
    max_memory: int | str | None = None
    ignore_config_keys: tuple[str, ...] = ()
    max_kl: float | None = None
    max_ppl_increase: float | None = None
    min_top1: float | None = None
    accuracy_text: Path | None = None
    accuracy_tokens: int | None = None

    @property
    def thresholds(self) -> dict[str, float | None]:
        """What the quantized model must keep to, by name."""
        return {"max_kl": self.max_kl, "max_ppl_increase": self.max_ppl_increase, "min_top1": self.min_top1}

    @property
    def measures_accuracy(self) -> bool:
        """Whether the quantized model is compared with the unquantized one."""
        given = (*self.thresholds.values(), self.accuracy_text, self.accuracy_tokens)
        return any(value is not None for value in given)

    @property
    def memory_limit(self) -> int | None:
        """`max_memory` in bytes."""
        return parse_size(str(self.max_memory)) if self.max_memory is not None else None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", Path(self.model))
        object.__setattr__(self, "output", Path(self.output))
        for name in ("calibration", "calibration_text"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.accuracy_text is not None:
            object.__setattr__(self, "accuracy_text", Path(self.accuracy_text))
        if self.quant_config is not None:
            self._read_quant_config(Path(self.quant_config))
        check_thresholds(self.thresholds)
        for name, least in (
            ("max_batch_size", 1),
            ("max_num_tokens", 1),
            ("max_seq_len", 2),
            ("calibration_tokens", 2),
            ("accuracy_tokens", 2),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(
                    f"{name} is {value!r}", where=_option(name), hint=f"it must be an integer of at least {least}"
                )
        try:
            _ = self.memory_limit
        except ValueError as error:
            raise ConfigError(
                f"max_memory: {error}", where=_option("max_memory"), hint="give 4GiB, 4G (the same), 4GB or 500M"
            ) from None
        if self.max_num_tokens is not None and self.max_num_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}, but max_batch_size is {self.max_batch_size}",
                where=_option("max_num_tokens"),
                hint="a step holds one token of every running sequence: max_num_tokens must be at least max_batch_size",
            )

    def _read_quant_config(self, path: Path) -> None:
        from llmbuild.builder.quant_config import OPTION, read_quant_config

        given = {"--quant": self.quant, "--exclude": self.exclude, "--quant-layer": self.quant_layers}
        if other := next((option for option, value in given.items() if value), None):
            raise ConfigError(f"{OPTION} says all that {other} does", where=other, hint="leave one of them out")
        found = read_quant_config(path)
        read = {"quant": found.quant, "exclude": found.exclude, "quant_layers": found.quant_layers}
        for name, value in {**read, "quant_config": None}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Choices:
    """target, quant: given or chosen. notes: one line for each choice that the user did not make.

    recipe: the one called `quant`, with the user's exclusions and rules. sm: as `BuildConfig.sm`, without those that
    the recipe does not run on.
    """

    target: str
    quant: str
    recipe: Recipe
    notes: list[str] = field(default_factory=list)
    sm: str | None = None


def choose(config: BuildConfig) -> Choices:
    """Settle target and recipe, that of the KV cache included, and check names, before anything heavy is imported.

    Raises:
        UnsupportedError: The target or a GPU has no products that the recipe asks for.
        ConfigError: A name is unknown, or "gguf" is asked for a model that is not GGUF, "stored" for one that is not
            quantized.
        ModelError: Two files say different things about how a checkpoint is quantized.
    """
    from llmbuild.builder.frontend.quantized_config import stored_quantization
    from llmbuild.builder.targets.gpus import gpus_of
    from llmbuild.quantization.recipes import customized

    notes = []
    target = config.target
    if target is None:
        target = "cpu"
        notes.append("target cpu: --target cuda makes an engine for NVIDIA GPUs")
    _check_target_name(target)
    _check_sm(config.sm, target)
    _check_builder_options(config.builder_options, target)
    if config.dtype is not None and config.dtype not in DTYPES:
        raise ConfigError(
            f"unknown dtype {config.dtype!r}", where=_option("dtype"), hint=nearest(config.dtype, list(DTYPES))
        )
    is_gguf = config.model.suffix == ".gguf"
    quant = config.quant
    if quant is None:
        quant = "gguf" if is_gguf else "none" if stored_quantization(config.model) is None else "stored"
        notes.append(f"quant {quant}: {KEPT[quant]}")
    recipe = replace(customized(quant, config.exclude, config.quant_layers), kv_cache=_choose_cache(config, notes))
    _check_calibration(config, recipe, notes)
    if quant == "gguf" and not is_gguf:
        raise ConfigError(
            f"the recipe 'gguf' keeps the blocks of a GGUF file, but {config.model.name} is not one",
            where=_option("quant"),
            hint="leave --quant out, or choose int8-wo or int4-wo",
        )
    if quant == "stored" and not is_gguf and stored_quantization(config.model) is None:
        raise ConfigError(
            f"the recipe 'stored' keeps the weights of a quantized checkpoint, but {config.model.name} is not one",
            where=_option("quant"),
            hint="leave --quant out, or choose int8-wo or int4-wo",
        )
    recipe, sm = _choose_float8(config, target, recipe, notes)
    gpus = gpus_of(target)
    if gpus is not None and gpus.at_hand:
        notes.append("sm: that of the GPU here")
    elif gpus is not None and sm is None:
        which = "all that are known" if target == "cuda" else "usual ones"
        notes.append(f"sm {','.join(map(str, gpus.default))}: {which}; fewer are built faster")
    return Choices(target, quant, recipe, notes, sm)


def check_thresholds(given: Mapping[str, float | None]) -> None:
    """Raise ConfigError for a threshold, by name, that is negative or no number; a share is at most 1 as well."""
    for name, value in given.items():
        if value is None:
            continue
        most = 1.0 if name == "min_top1" else float("inf")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
            allowed = "a number from 0 to 1" if name == "min_top1" else "a number of at least 0"
            raise ConfigError(f"{name} is {value!r}", where=_option(name), hint=f"it must be {allowed}")


def _choose_cache(config: BuildConfig, notes: list[str]) -> KvCache | None:
    from llmbuild.builder.frontend.quantized_config import stored_cache, stored_quantization
    from llmbuild.quantization.recipes import KV_CACHES, KvCache

    wanted = config.kv_cache_dtype or "auto"
    if wanted in DTYPES:
        return None
    if wanted not in ("auto", *KV_CACHES):
        raise ConfigError(
            f"unknown KV cache dtype {wanted!r}",
            where=_option("kv_cache_dtype"),
            hint=nearest(wanted, ["auto", *KV_CACHES, *DTYPES]),
        )
    described = None if config.model.suffix == ".gguf" else stored_cache(stored_quantization(config.model))
    if wanted == "auto" and described is None:
        return None
    if wanted == "auto" and described != "fp8":
        notes.append(f"kv_cache_dtype auto: what is computed in; {described} of the checkpoint is not known")
        return None
    dtype = "fp8" if wanted == "auto" else wanted
    if dtype == "int8":
        return KvCache("int8")
    if described == "fp8":
        notes.append("kv_cache_dtype fp8: with the scales of the checkpoint")
    return KvCache("fp8", stored=described == "fp8")


def resolve_cache(config: BuildConfig, choices: Choices, target: Target, dtype: str, notes: list[str]) -> Choices:
    """Settle the KV cache once target and dtype are; adds a note when it cannot store what the checkpoint describes.

    Raises:
        UnsupportedError: The target does not have the cache that the user asks for.
    """
    if config.kv_cache_dtype in DTYPES and config.kv_cache_dtype != dtype:
        raise UnsupportedError(
            f"the KV cache cannot be in {config.kv_cache_dtype} where {dtype} is computed in",
            where=_option("kv_cache_dtype"),
            hint=f"use --kv-cache-dtype {dtype}, or --dtype {config.kv_cache_dtype}",
        )
    cache = choices.recipe.kv_cache
    if cache is None or cache.dtype in target.kv_caches:
        return choices
    what = f"the {target.name} target has no {cache.dtype} KV cache"
    if config.kv_cache_dtype in (None, "auto"):
        notes.append(f"{what}: the computation dtype is taken")
        return replace(choices, recipe=replace(choices.recipe, kv_cache=None))
    has = " or ".join(f"--kv-cache-dtype {each}" for each in (*target.kv_caches, "auto"))
    raise UnsupportedError(what, where=_option("kv_cache_dtype"), hint=f"use {has}")


def _check_calibration(config: BuildConfig, recipe: Recipe, notes: list[str]) -> None:
    given = [
        name for name in ("calibration", "calibration_text", "calibration_tokens") if getattr(config, name) is not None
    ]
    if given and not recipe.calibrated:
        raise ConfigError(
            f"recipe {recipe.name!r} needs no calibration", where=_option(given[0]), hint="leave the option out"
        )
    if not recipe.calibrated:
        return
    found = config.calibration is not None and config.calibration.exists()
    if found and given != ["calibration"]:
        raise ConfigError(
            f"{config.calibration} exists, so that no text is run",
            where=_option(given[1]),
            hint="leave the option out, or give --calibration a path that does not exist yet",
        )
    if not found and config.calibration_text is None:
        notes.append("calibration text: documentation strings of the installed Python")


def _choose_float8(config: BuildConfig, target: str, recipe: Recipe, notes: list[str]) -> tuple[Recipe, str | None]:
    """Return the recipe and the SMs, as --sm takes them, after looking at which of them multiply 8-bit floats."""
    from llmbuild.builder.frontend.quantized_config import stored_quantization, stores_float8
    from llmbuild.builder.targets.gpus import gpus_of
    from llmbuild.quantization.recipes import RECIPES, multiplying_float8

    asked = recipe.float8
    gpus = gpus_of(target)
    if gpus is None:
        if asked is not None:
            others = ", ".join(each.name for each in RECIPES.values() if each.float8 is None)
            raise UnsupportedError(
                f"the {target} target has no products of 8-bit floats, which recipe {asked!r} asks for",
                where=_option("quant" if asked == recipe.name else "quant_layer"),
                hint=f"use --target cuda, or one of {others}",
            )
        return recipe, config.sm
    stored = config.model.suffix != ".gguf" and recipe.keeps_stored and stores_float8(stored_quantization(config.model))
    if asked is None and not (stored and gpus.products):
        return recipe, config.sm
    able = ",".join(map(str, gpus.float8))
    if config.sm is None and gpus.at_hand:
        return multiplying_float8(recipe), None
    if config.sm is None:
        notes.append(f"sm {able}: those that multiply 8-bit floats; fewer are built faster")
        return multiplying_float8(recipe), able
    if unable := [sm for sm in gpus.parse(config.sm) if not gpus.can_float8(sm)]:
        what = f"SM {', '.join(map(str, unable))} cannot multiply 8-bit floats"
        if asked is not None:
            raise UnsupportedError(
                f"{what}, which recipe {asked!r} asks for",
                where="--sm",
                hint=f"those that can: {able}; a recipe for all is int8-wo",
            )
        notes.append(f"8-bit floats of the checkpoint are dequantized: {what}")
        return recipe, config.sm
    return multiplying_float8(recipe), config.sm


def _check_sm(sm: str | None, target: str) -> None:
    from llmbuild.builder.targets.gpus import gpus_of

    gpus = gpus_of(target)
    if sm is None:
        return
    if gpus is None:
        raise ConfigError(f"the {target} target is compiled for no GPU", where="--sm", hint="leave --sm out")
    gpus.parse(sm)


def _check_builder_options(options: tuple[str, ...], target: str) -> None:
    if target in ("tensorrt", "tensorrt-rtx"):
        from llmbuild.builder.targets.tensorrt.builder_options import parse

        parse(options, target)
    elif options:
        raise ConfigError(
            f"the {target} target has no builder of a vendor to give options to",
            where="--builder-option",
            hint="leave it out, or use --target tensorrt or tensorrt-rtx",
        )


def _check_target_name(target: str) -> None:
    from llmbuild.builder.targets.registry import TARGETS

    if target in TARGETS:
        return
    raise ConfigError(f"unknown target {target!r}", where=_option("target"), hint=nearest(target, list(TARGETS)))


def resolve_dtype(config: BuildConfig, target: Target, notes: list[str]) -> str:
    """Settle the computation dtype once the target is known; adds a note when the user did not give it.

    Raises:
        ConfigError: The target cannot build on this machine.
        UnsupportedError: It does not compute in the dtype.
    """
    reason = target.probe()
    if reason is not None:
        raise ConfigError(f"the {target.name} target cannot build here: {reason}", where=_option("target"))
    if config.dtype is None:
        notes.append(f"dtype {target.dtypes[0]}: what the {target.name} target computes in")
        return target.dtypes[0]
    if config.dtype not in target.dtypes:
        raise UnsupportedError(
            f"the {target.name} target does not compute in {config.dtype}",
            where=_option("dtype"),
            hint=f"use --dtype {' or '.join(target.dtypes)}; --quant int8-wo or int4-wo makes the engine smaller",
        )
    return config.dtype


def resolve_limits(config: BuildConfig, info: ModelInfo, notes: list[str]) -> Limits:
    """Settle the engine's limits once the model is known; adds a note for each limit that the user did not give.

    Raises:
        ConfigError: max_seq_len is beyond what the model was made for.
    """
    from llmbuild.builder.targets.base import Limits

    longest = info.max_position_embeddings
    seq_len = config.max_seq_len
    if seq_len is None:
        seq_len = min(longest, DEFAULT_MAX_SEQ_LEN)
        notes.append(f"max_seq_len {seq_len}: the model was made for {longest}" + _raise_it(seq_len < longest))
    elif seq_len > longest:
        raise ConfigError(
            f"max_seq_len is {seq_len}, but {info.name} was made for sequences of at most {longest} tokens",
            where=_option("max_seq_len"),
            hint=f"give at most {longest}",
        )
    num_tokens = config.max_num_tokens
    if num_tokens is None:
        num_tokens = max(DEFAULT_MAX_NUM_TOKENS, config.max_batch_size)
        notes.append(f"max_num_tokens {num_tokens}: longer prompts are processed in chunks of that many tokens")
    return Limits(max_batch_size=config.max_batch_size, max_num_tokens=num_tokens, max_seq_len=seq_len)


def check_build_packages() -> None:
    """Raise ConfigError when the packages that building needs, and running does not, are missing."""
    missing = [name for name in BUILD_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"converting a model needs packages that are not installed: {', '.join(missing)}",
            hint='pip install "llmbuild[build]"; running an engine does not need them',
        )


def _raise_it(capped: bool) -> str:
    return ", --max-seq-len raises the limit" if capped else ""


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
