"""Conventions of the GGUF architectures whose logits are proven equal to Hugging Face's; others are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmbuild.errors import UnsupportedError, nearest


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` maps to a Hugging Face model type.

    Attributes:
        model_type: Hugging Face model type.
        interleaved: Rows of q and k are stored so that rotary pairs are neighbours (2i, 2i + 1), where Hugging Face
            has the two halves of a head (i, i + D/2).
        qkv_bias: Whether q, k and v always have biases; None if their presence decides.
    """

    model_type: str
    interleaved: bool
    qkv_bias: bool | None


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, qkv_bias=None),
    "qwen2": Architecture("qwen2", interleaved=False, qkv_bias=True),
    "qwen3": Architecture("qwen3", interleaved=False, qkv_bias=None),
}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, [D/2]: how GGUF stores Llama 3's scaling

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_architecture(name: str) -> Architecture:
    """Return the conventions of `name`. Raises UnsupportedError for an architecture that is not proven."""
    try:
        return ARCHITECTURES[name]
    except KeyError:
        raise UnsupportedError(
            f"GGUF architecture {name!r} is not supported",
            where="general.architecture",
            hint=nearest(name, list(ARCHITECTURES)) + "; or convert the Hugging Face checkpoint of this model",
        ) from None


def hf_name(name: str) -> str:
    """Translate a GGUF tensor name; a name with no counterpart is returned as it is and ends up as unused."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{suffix}"
    return name
