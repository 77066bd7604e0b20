"""Write tiny models as GGUF files, by the conventions of llama.cpp's converter, with every block type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[inner]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection as llama.cpp wants them for architecture "llama"."""
    per_head = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def random_blocks(type_name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random stored rows, uint8 [rows, bytes], whose scales are finite and of the size of trained weights."""
    size, bytes_per_block = gguf.GGML_QUANT_SIZES[Type[type_name]]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows, columns // size, bytes_per_block), dtype=np.uint8)
    halves = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(type_name, [0])
    step = {"Q6_K": 3e-5, "Q4_K": 3e-4, "Q5_K": 2e-4, "Q8_0": 1e-3}.get(type_name, 0.02)
    for place in halves:
        values = generator.standard_normal(raw.shape[:2]).astype(np.float32) * step
        raw[:, :, place : place + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def write_gguf(
    model: Any,
    path: Path,
    *,
    type_name: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a tiny llama, qwen2 or qwen3 model. Its matrices are replaced *in the model* by what the file holds.

    Args:
        model: From `tiny_model`; modified in place when `type_name` rounds.
        path: The .gguf file.
        type_name: GGUF type of all matrices; vectors stay F32. Types that gguf-py cannot make get random blocks.
        metadata: More keys, or other values, under "<architecture>."; None leaves a key out.
        extra_tensors: More float32 tensors by GGUF name.
        edit: Called with the writer before it writes.
    """
    config, architecture = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else None,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        **(metadata or {}),
    }
    for key, value in keys.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            add[type(value)](f"{architecture}.{key}", value)
    write_byte_tokenizer(writer)
    if edit:
        edit(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        value = parameter.detach().numpy()
        if value.ndim == 2 and type_name != "F32":
            stored, value = _round(value, type_name, seed)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(value))
        else:
            stored = value
        count = next((count for word, count in heads.items() if word in name), None)
        if architecture == "llama" and count:
            stored = permute(stored, count)
        raw_dtype = Type[type_name] if value.ndim == 2 and type_name != "F32" else None
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored), raw_dtype=raw_dtype)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _round(value: np.ndarray, type_name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(stored bytes, the float32 values they stand for)."""
    kind = Type[type_name]
    try:
        stored = gguf.quants.quantize(value, kind)
    except NotImplementedError:  # gguf-py only reads the K types
        stored = random_blocks(type_name, *value.shape, seed=seed)
    return stored, gguf.quants.dequantize(stored, kind)


def write_byte_tokenizer(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    """The byte-level tokenizer of `tiny_models`, as GGUF metadata."""
    from support.tiny_models import BOS, CHAT_TEMPLATE, EOS, PAD, byte_level_tokenizer

    tokenizer = byte_level_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in (EOS, BOS, PAD) else 1 for index in range(len(tokens))])
    writer.add_token_merges(_merges(tokenizer))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(CHAT_TEMPLATE)


def _merges(tokenizer: Any) -> list[str]:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
