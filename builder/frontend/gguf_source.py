"""A GGUF file as a `ModelSource`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmbuild.builder.frontend.gguf_checkpoint import GGUFCheckpoint
from llmbuild.builder.frontend.gguf_config import gguf_config
from llmbuild.builder.frontend.gguf_file import GGUFFile
from llmbuild.builder.frontend.gguf_tokenizer import gguf_tokenizer_files
from llmbuild.builder.frontend.hf_model import GENERATION_CONFIG
from llmbuild.builder.frontend.source import ModelSource


def open_gguf(path: Path) -> ModelSource:
    """Read the metadata of `path`. Raises ModelError or UnsupportedError, naming the key or tensor."""
    gguf = GGUFFile(path)
    config = gguf_config(gguf)
    checkpoint = GGUFCheckpoint(gguf, (config.num_attention_heads, config.num_key_value_heads))
    generation = _generation(gguf)
    files = gguf_tokenizer_files(gguf)
    files[GENERATION_CONFIG] = (json.dumps(generation, indent=2, sort_keys=True) + "\n").encode()
    factors = checkpoint.rope_factors
    return ModelSource(
        name=path.stem,
        config=config,
        checkpoint=checkpoint,
        generation=generation,
        tokenizer_files=files,
        files=(path,),
        rope_factors=None if factors is None else factors.load(),
    )


def _generation(gguf: GGUFFile) -> dict[str, Any]:
    """Token ids that start and end a text; a file may name an end of turn besides the end of text."""
    ends = [gguf.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    found = list(dict.fromkeys(index for index in ends if index is not None))
    ids = {"bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"), "eos_token_id": found or None}
    return {key: value for key, value in ids.items() if value is not None}
