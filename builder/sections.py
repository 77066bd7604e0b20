"""The sections of `engine.json`, from what the phases of a build produced."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import llmbuild
from llmbuild.builder.ir import BlockPart, ModelInfo, Program
from llmbuild.builder.options import Choices
from llmbuild.builder.targets.base import CompiledTarget, Limits
from llmbuild.engine.manifest import (
    BuildSection,
    KVCacheSection,
    LayerKVSection,
    LimitsSection,
    ModelSection,
    PrecisionSection,
    SourceFile,
    TargetSection,
)
from llmbuild.quantization.recipes import KvCache


def model(info: ModelInfo) -> ModelSection:
    return ModelSection(
        name=info.name,
        architecture=info.architecture,
        source_kind=info.source_kind,  # type: ignore[arg-type]  # checked by the section
        source_files=[SourceFile(name=name, size=size, sha256=sha256) for name, size, sha256 in info.source_files],
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        num_layers=info.num_layers,
        max_position_embeddings=info.max_position_embeddings,
        bos_token_id=info.bos_token_id,
        eos_token_ids=list(info.eos_token_ids),
        pad_token_id=info.pad_token_id,
    )


def target(name: str, compiled: CompiledTarget) -> TargetSection:
    return TargetSection(name=name, requires=compiled.requires, toolchain=compiled.toolchain, section=compiled.section)


def precision(dtype: str, recipe: str, compiled: CompiledTarget) -> PrecisionSection:
    return PrecisionSection(dtype=dtype, recipe=recipe, weights=compiled.weight_bytes)


def limits(limits: Limits) -> LimitsSection:
    return LimitsSection(
        max_batch_size=limits.max_batch_size, max_num_tokens=limits.max_num_tokens, max_seq_len=limits.max_seq_len
    )


def kv_cache(
    program: Program, dtype: str, limits: Limits, cache: KvCache | None, block_size: int | None = None
) -> KVCacheSection:
    """Return the section. dtype: what is computed in, which a cache is in unless it is `cache`.

    block_size: of the engine, where it is not that of `limits`.
    """
    layers = [
        LayerKVSection(
            num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim, v_head_dim=layer.v_head_dim, window=layer.window
        )
        for layer in program.kv_layers
    ]
    name = dtype if cache is None else cache.name
    return KVCacheSection(dtype=name, block_size=block_size or limits.block_size, layers=layers)


def build(
    choices: Choices, dtype: str, limits: Limits, sm: str | None, calibration: dict[str, Any] | None = None
) -> BuildSection:
    """Return the section. calibration: what statistics were used, `Calibration.section()`."""
    options: dict[str, Any] = {
        "target": choices.target,
        "dtype": dtype,
        "quant": choices.quant,
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_num_tokens,
        "max_seq_len": limits.max_seq_len,
    }
    if sm is not None:
        options["sm"] = sm
    if choices.recipe.kv_cache is not None:
        options["kv_cache_dtype"] = choices.recipe.kv_cache.dtype
    if choices.recipe.exclude:
        options["exclude"] = list(choices.recipe.exclude)
    if choices.recipe.layers:
        options["quant_layers"] = [f"{rule.pattern}={rule.recipe}" for rule in choices.recipe.layers]
    if calibration is not None:
        options["calibration"] = calibration
    return BuildSection(llmbuild_version=llmbuild.__version__, options=options)


def write_tokenizer(program: Program, directory: Path) -> None:
    folder = directory / "tokenizer"
    folder.mkdir()
    for name, content in sorted(program.tokenizer_files.items()):
        (folder / name).write_bytes(content)


def least_weight_bytes(program: Program) -> int:
    """Return how many bytes of weights the engine holds at least, without reading any.

    A lower bound, so that a disk that suffices is never refused: blocks count at their bit width, scales at 2 bytes.
    """
    total = 0
    for weight in program.weights.values():
        elements = math.prod(weight.shape)
        if isinstance(weight, BlockPart) and weight.source.block_format is not None:
            total += elements * weight.source.block_format.bits // 8 if weight.part == "q" else elements * 2
        else:
            total += elements * weight.dtype.itemsize
    return total
