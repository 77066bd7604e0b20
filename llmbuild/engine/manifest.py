"""`engine.json`: the types of engine format version 1. Strict: unknown fields are an error, nothing is defaulted."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FORMAT_VERSION = 1
MANIFEST_NAME = "engine.json"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(Section):
    """One file of the engine. `path` is relative and uses forward slashes."""

    path: str
    size: int
    sha256: str


class SourceFile(Section):
    """One file the model was read from; `name` has no directory, so that the same model gives the same bytes."""

    name: str
    size: int
    sha256: str


class ModelSection(Section):
    name: str
    architecture: str
    source_kind: Literal["huggingface", "gguf"]
    source_files: list[SourceFile]
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    pad_token_id: int | None


class LayerKVSection(Section):
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None


class KVCacheSection(Section):
    """dtype: numpy name. block_size: tokens a block. layers: geometry by layer index."""

    dtype: str
    block_size: int
    layers: list[LayerKVSection]


class PrecisionSection(Section):
    """dtype: computation dtype. recipe: the --quant that was asked for or chosen. weights: bytes by storage format."""

    dtype: str
    recipe: str
    weights: dict[str, int]


class LimitsSection(Section):
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int


class TargetSection(Section):
    """requires: package -> version range checked at load. toolchain: package -> version that built the engine.

    section: what this target's executor needs; its shape belongs to the target.
    """

    name: str
    requires: dict[str, str]
    toolchain: dict[str, str]
    section: dict[str, Any]


class BuildSection(Section):
    """The options that made the engine, without paths or times: the same inputs give the same bytes."""

    llmbuild_version: str
    options: dict[str, Any]


class Manifest(Section):
    format_version: int
    model: ModelSection
    target: TargetSection
    precision: PrecisionSection
    limits: LimitsSection
    kv_cache: KVCacheSection
    build: BuildSection
    files: list[FileEntry]

    def to_json(self) -> str:
        """Return the deterministic text of `engine.json` (sorted keys, indented, newline at the end)."""
        import json

        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
