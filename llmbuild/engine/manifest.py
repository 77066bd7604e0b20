"""`engine.json`: the types of engine format version 1. Strict: unknown fields are an error, nothing is defaulted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from llmbuild.engine.hashing import path_problem

FORMAT_VERSION = 1
MANIFEST_NAME = "engine.json"
CHECKSUM_NAME = "engine.json.sha256"
REPORT_NAME = "report.json"
ACCURACY_PLOT_NAME = "accuracy.svg"

Count = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def compact_json(self) -> bytes:
        """Return a deterministic text of all of it, without white space."""
        import json

        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


class FileEntry(Section):
    """One file of the engine. `path` is relative, uses forward slashes and stays inside the directory."""

    path: str
    size: Bytes
    sha256: Sha256

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        problem = path_problem(path)
        if problem is not None:
            raise ValueError(problem)
        return path


class SourceFile(Section):
    """One file the model was read from; `name` has no directory, so that the same model gives the same bytes."""

    name: str
    size: Bytes
    sha256: Sha256


class ModelSection(Section):
    name: str
    architecture: str
    source_kind: Literal["huggingface", "gguf"]
    source_files: list[SourceFile]
    vocab_size: Count
    hidden_size: Count
    num_layers: Count
    max_position_embeddings: Count
    bos_token_id: int | None
    eos_token_ids: list[int]
    pad_token_id: int | None


class LayerKVSection(Section):
    num_kv_heads: Count
    head_dim: Count
    v_head_dim: Count
    window: Count | None


class KVCacheSection(Section):
    """dtype: numpy name. block_size: tokens a block. layers: geometry by layer index.

    A cache in "int8" has a float32 scale for each token and head beside its numbers; one in "float8_e4m3fn" has two
    for each layer, which are weights.
    """

    dtype: str
    block_size: Count
    layers: list[LayerKVSection]

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in all layers, scales included."""
        from llmbuild.engine.launch_plan import ITEM_BYTES

        heads = sum(layer.num_kv_heads for layer in self.layers)
        values = sum(layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in self.layers)
        scales = 2 * heads * ITEM_BYTES["float32"] if self.dtype == "int8" else 0
        return values * ITEM_BYTES[self.dtype] + scales


class PrecisionSection(Section):
    """dtype: computation dtype. recipe: the --quant that was asked for or chosen. weights: bytes by storage format."""

    dtype: str
    recipe: str
    weights: dict[str, Bytes]


class LimitsSection(Section):
    """max_batch_size: sequences a step. max_num_tokens: tokens a step. max_seq_len: prompt and output of a sequence."""

    max_batch_size: Count
    max_num_tokens: Count
    max_seq_len: Count


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
    """The whole of `engine.json`. `files` lists every other file of the engine except `engine.json.sha256`."""

    format_version: int
    model: ModelSection
    target: TargetSection
    precision: PrecisionSection
    limits: LimitsSection
    kv_cache: KVCacheSection
    build: BuildSection
    files: list[FileEntry]

    @field_validator("files")
    @classmethod
    def _listed_once(cls, files: list[FileEntry]) -> list[FileEntry]:
        paths = [entry.path for entry in files]
        twice = sorted({path for path in paths if paths.count(path) > 1}) if len(set(paths)) < len(paths) else []
        if twice:
            raise ValueError(f"listed twice: {', '.join(twice)}")
        return files

    def to_json(self) -> str:
        """Return the deterministic text of `engine.json` (sorted keys, indented, newline at the end)."""
        import json

        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
