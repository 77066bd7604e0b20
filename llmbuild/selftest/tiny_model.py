"""A Llama of two layers with seeded weights, written as a Hugging Face directory: the same on every machine."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB_SIZE = 256
HIDDEN, INNER, LAYERS = 64, 128, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_model(directory: Path, seed: int = 0) -> Path:
    """Write config and weights, float32, and return the directory.

    Weights are scaled so that activations neither vanish nor saturate; norms differ from 1.
    """
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, size: float | None = None) -> np.ndarray:
        scale = 1.5 / columns**0.5 if size is None else size
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * random.standard_normal(HIDDEN)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN, 0.04)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = norm()
    weights["model.norm.weight"] = norm()
    weights["lm_head.weight"] = matrix(VOCAB_SIZE, HIDDEN)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    save_file(weights, directory / "model.safetensors")
    return directory
