"""Attention in chunks, in which a token sees nothing before its own chunk (Llama 4): settled at build time, and stated.

Up to the end of the first chunk it is plain causal attention. The engine ends there, and is exact.
"""

from __future__ import annotations

from transformers import PretrainedConfig

CHUNKED, FULL = "chunked_attention", "full_attention"


def settle(config: PretrainedConfig) -> tuple[int | None, list[str]]:
    """Turn chunked layers into full ones, in `config`, in place.

    Returns:
        The length at which the engine ends, or None; what was chosen, in words.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    if not chunk:
        return None, []
    config.attention_chunk_size = None
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [FULL if kind == CHUNKED else kind for kind in kinds]
    longest = min(chunk, config.max_position_embeddings)
    return longest, [f"attention_chunk_size: exact up to the end of the first chunk ({chunk}), where the engine ends"]
