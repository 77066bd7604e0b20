"""GGUF metadata → Hugging Face config. A key that is not understood stops the build: it might change numerics."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from llmbuild.builder.frontend.gguf_architectures import find_architecture
from llmbuild.builder.frontend.gguf_file import GGUFFile
from llmbuild.errors import ModelError, UnsupportedError

# Keys under "<architecture>." that are read below, or that describe training or file layout only.
_KNOWN = {
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scale_linear",
    "tensor_data_layout",
    "vocab_size",
}


def gguf_config(gguf: GGUFFile) -> PretrainedConfig:
    """Return the config that makes transformers compute what the file's architecture means.

    Raises:
        UnsupportedError: an architecture, key or value that is not proven equal.
        ModelError: a required key is missing or contradicts a tensor.
    """
    name = gguf.require("general.architecture")
    architecture = find_architecture(name)
    for key in gguf.keys:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in _KNOWN:
            shown = f"{key} = {gguf.get(key)!r}"
            raise UnsupportedError(f"GGUF metadata key {shown} is not supported", where=gguf.path.name)

    def require(key: str) -> int:
        value = gguf.require(f"{name}.{key}")
        if not isinstance(value, int):
            raise UnsupportedError(f"GGUF metadata key {name}.{key} has one value per layer", where=gguf.path.name)
        return value

    if (gguf.get(f"{name}.expert_count") or 0) > 0:
        raise UnsupportedError(
            f"GGUF metadata key {name}.expert_count: mixtures of experts are not supported yet", where=gguf.path.name
        )
    if gguf.get(f"{name}.attention.causal", True) is False:
        raise UnsupportedError("attention is not causal", where=f"{gguf.path.name}: {name}.attention.causal")
    hidden, heads = require("embedding_length"), require("attention.head_count")
    head_dim = gguf.get(f"{name}.attention.key_length") or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        value = gguf.get(f"{name}.{key}", head_dim)
        if value != head_dim:
            raise UnsupportedError(
                f"GGUF metadata key {name}.{key} = {value} differs from the head size {head_dim}", where=gguf.path.name
            )
    values: dict[str, Any] = dict(
        hidden_size=hidden,
        intermediate_size=require("feed_forward_length"),
        num_hidden_layers=require("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=gguf.get(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=require("context_length"),
        rms_norm_eps=gguf.require(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(gguf, name),
        vocab_size=_vocab_size(gguf, name),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        bos_token_id=gguf.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=gguf.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=gguf.get("tokenizer.ggml.padding_token_id"),
    )
    if architecture.qkv_bias is None:
        values["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    if architecture.model_type == "llama":
        values["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    if architecture.model_type != "llama":
        values["use_sliding_window"] = False  # GGUF has a key for it, which is refused above
    return AutoConfig.for_model(architecture.model_type, **values)


def _rope(gguf: GGUFFile, name: str) -> dict[str, Any]:
    kind = gguf.get(f"{name}.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(gguf.get(f"{name}.rope.freq_base", 10000.0))}
    if kind == "linear" or (kind == "none" and gguf.get(f"{name}.rope.scale_linear", 1.0) != 1.0):
        factor = gguf.get(f"{name}.rope.scaling.factor", gguf.get(f"{name}.rope.scale_linear", 1.0))
        return rope | {"rope_type": "linear", "factor": float(factor)}
    if kind != "none":
        raise UnsupportedError(
            f"GGUF metadata key {name}.rope.scaling.type = {kind!r} is not supported",
            where=gguf.path.name,
            hint="supported: none, linear, and the frequency factors of Llama 3",
        )
    return rope


def _vocab_size(gguf: GGUFFile, name: str) -> int:
    """Rows of the embedding table; what the metadata say about it must agree."""
    table = gguf.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError("tensor 'token_embd.weight' is missing", where=str(gguf.path))
    rows = int(table.shape[1])
    stated = gguf.get(f"{name}.vocab_size", rows)
    if stated != rows:
        raise ModelError(f"{name}.vocab_size is {stated}, but token_embd.weight has {rows} rows", where=str(gguf.path))
    return rows
