"""The small files of a Hugging Face directory: config, generation config, end-of-sequence ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, PretrainedConfig
from transformers import __version__ as transformers_version

from llmbuild.errors import ModelError, UnsupportedError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def load_config(directory: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read `config.json` with transformers, offline.

    Raises:
        ModelError: no model directory, or an unreadable config.
        UnsupportedError: transformers does not know the model type.
    """
    if not directory.is_dir():
        raise ModelError(f"{str(directory)!r} is not a model directory or a .gguf file")
    if not (directory / CONFIG).is_file():
        raise ModelError(
            f"{directory.name!r} is not a model directory: it has no {CONFIG}",
            where=str(directory),
            hint="give a Hugging Face model directory, or a .gguf file",
        )
    raw = read_json(directory / CONFIG)
    remote = "auto_map" in raw and trust_remote_code
    if "model_type" not in raw and not remote:
        raise ModelError(f"{CONFIG} has no model_type", where=str(directory / CONFIG))
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UnsupportedError(
            f"transformers {transformers_version} cannot read model type {raw.get('model_type')!r}: {reason}",
            where=str(directory / CONFIG),
            hint="the model brings its own code: --trust-remote-code runs it" if "auto_map" in raw else None,
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file.name} is not valid JSON: {error}", where=str(file)) from None
    if not isinstance(value, dict):
        raise ModelError(f"{file.name} is not a JSON object", where=str(file))
    return value


def forget_quantization(config: PretrainedConfig) -> None:
    """Drop what the config says about quantized weights, so that transformers builds plain modules for the trace."""
    for key in ("quantization_config", "compression_config"):
        if hasattr(config, key):
            delattr(config, key)


def load_generation_config(directory: Path) -> dict[str, Any]:
    """Return `generation_config.json` as it is, or {}."""
    file = directory / GENERATION_CONFIG
    return read_json(file) if file.is_file() else {}


class SpecialIds(NamedTuple):
    """Ids that start, end and pad a text. Any of `eos` ends it."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def special_ids(config: PretrainedConfig, generation: dict[str, Any]) -> SpecialIds:
    """Read the ids from the generation config, and from the model config where that is silent."""

    def ids(key: str) -> tuple[int, ...]:
        value = generation.get(key)
        if value is None:
            value = getattr(config, key, None)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    bos, eos, pad = ids("bos_token_id"), ids("eos_token_id"), ids("pad_token_id")
    return SpecialIds(bos[0] if bos else None, eos, pad[0] if pad else None)


def longest_sequence(config: PretrainedConfig) -> int | None:
    """The longest sequence that the model was made for, by whichever of their names for it the config uses."""
    for key in ("max_position_embeddings", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int):
            return value
    return None
