"""A complete engine directory with a few bytes of payload, for tests of everything around the payload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmbuild.engine.manifest import (
    BuildSection,
    KVCacheSection,
    LayerKVSection,
    LimitsSection,
    Manifest,
    ModelSection,
    PrecisionSection,
    SourceFile,
    TargetSection,
)
from llmbuild.engine.writer import EngineWriter

PAYLOAD = {
    "plan/model.onnx": b"graph" * 7,
    "report.json": b"{}\n",
    "tokenizer/tokenizer.json": b'{"model": {}}\n',
    "weights/model.safetensors": bytes(range(256)) * 20,
}


def sections(**changes: Any) -> dict[str, Any]:
    """Return valid manifest sections for `EngineWriter.commit`; `changes` replaces whole sections."""
    return {
        "model": ModelSection(
            name="tiny",
            architecture="LlamaForCausalLM",
            source_kind="huggingface",
            source_files=[SourceFile(name="model.safetensors", size=5, sha256="0" * 64)],
            vocab_size=64,
            hidden_size=32,
            num_layers=1,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_ids=[2],
            pad_token_id=None,
        ),
        "target": TargetSection(
            name="cpu", requires={"numpy": ">=1.26"}, toolchain={"onnx": "1.0"}, section={"model": "plan/model.onnx"}
        ),
        "precision": PrecisionSection(dtype="float32", recipe="none", weights={"float32": 5120}),
        "limits": LimitsSection(max_batch_size=4, max_num_tokens=32, max_seq_len=64),
        "kv_cache": KVCacheSection(
            dtype="float32",
            block_size=16,
            layers=[LayerKVSection(num_kv_heads=2, head_dim=8, v_head_dim=8, window=None)],
        ),
        "build": BuildSection(llmbuild_version="0.1.0", options={"quant": "none"}),
        **changes,
    }


def write_payload(directory: Path, payload: dict[str, bytes] | None = None) -> None:
    for relative, content in (payload or PAYLOAD).items():
        path = directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_engine(
    out: Path, *, force: bool = False, payload: dict[str, bytes] | None = None, **changes: Any
) -> Manifest:
    """Write a whole engine to `out` through `EngineWriter` and return its manifest."""
    with EngineWriter(out, force=force) as writer:
        write_payload(writer.directory, payload)
        return writer.commit(**sections(**changes))


def tree(directory: Path) -> dict[str, bytes]:
    """Return relative path -> content of every file below `directory`."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
