"""Seeded 2-layer models of many families, made in milliseconds, and a byte-level tokenizer to save beside them.

Norm weights, biases and sinks are randomised too, so that nothing hides behind ones and zeros.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 288  # 256 bytes, 3 special tokens, 29 merges
EOS, BOS, PAD = 256, 257, 258
EOS_TOKEN, BOS_TOKEN, PAD_TOKEN = "<|end|>", "<|begin|>", "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)

_BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=512,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
)
_WINDOWED: dict[str, Any] = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
_LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16
)
# For configs that have no such keys, or call them otherwise.
_ONE_WIDTH: dict[str, Any] = dict(intermediate_size=None, num_key_value_heads=None)
_OWN_NAMES: dict[str, Any] = dict(hidden_size=None, num_attention_heads=None, num_hidden_layers=None, **_ONE_WIDTH)
# What a family needs besides _BASE. None drops a key that the family's config derives itself.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=6),
    "qwen2": {},
    "qwen3": dict(head_dim=32),  # heads wider than hidden_size / num_attention_heads
    "phi3": {},
    "phi": {},
    "gemma": dict(head_dim=32),
    "gemma2": dict(
        head_dim=16,
        sliding_window=6,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3_text": dict(
        head_dim=16,
        sliding_window=6,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": dict(intermediate_size=None, num_key_value_heads=None),
    "gpt_neox": dict(num_key_value_heads=None),
    "gptj": dict(rotary_dim=8, intermediate_size=None, num_key_value_heads=None),
    "opt": dict(ffn_dim=96, word_embed_proj_dim=64, num_key_value_heads=None, intermediate_size=None),
    "starcoder2": dict(sliding_window=6),
    "stablelm": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "cohere": dict(logit_scale=0.5),
    "cohere2": dict(logit_scale=0.5, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "granite": dict(attention_multiplier=0.1, residual_multiplier=0.3, embedding_multiplier=3.0, logits_scaling=2.0),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "glm4": dict(head_dim=16),
    "exaone4": dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "nemotron": {},
    "helium": dict(head_dim=16),
    "ernie4_5": dict(head_dim=16),
    "arcee": {},
    "gpt_bigcode": dict(intermediate_size=None, num_key_value_heads=None),
    "codegen": dict(rotary_dim=8, intermediate_size=None, num_key_value_heads=None),
    "biogpt": {},
    "persimmon": {},
    "apertus": {},
    "hunyuan_v1_dense": dict(head_dim=16),
    "seed_oss": dict(head_dim=16),
    "minicpm3": dict(  # latent attention: values are narrower than keys
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16
    ),
    "vaultgemma": dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=16),
    "ministral3": dict(head_dim=16),
    # Attention written out in the model's own code, ALiBi among it.
    "falcon": dict(alibi=False, multi_query=True, **_ONE_WIDTH),
    "bloom": dict(seq_length=512, **_ONE_WIDTH),
    "mpt": dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=512, **_OWN_NAMES, max_position_embeddings=None),
    "gpt_neo": {
        **_OWN_NAMES,
        **dict(hidden_size=64, num_layers=2, num_heads=4, window_size=6, attention_types=[[["global", "local"], 1]]),
    },
    "xglm": dict(d_model=64, attention_heads=4, num_layers=2, ffn_dim=96, **_OWN_NAMES),
    "openai-gpt": _ONE_WIDTH,
    "gpt_neox_japanese": dict(num_key_value_heads=None),
    # The rest of the dense families.
    "ctrl": dict(dff=96, **_ONE_WIDTH),
    "jais2": {},
    "ministral": dict(head_dim=16, **_WINDOWED),
    "glm": dict(head_dim=16),
    "exaone": {},
    "internlm3": dict(head_dim=16),
    "hyperclovax": {},
    "iquestcoder": {},
    "cwm": dict(head_dim=16, **_WINDOWED),
    "granite_swa": _WINDOWED,
    "nanochat": {},
    "bitnet": {},
    "youtu": _LATENT,
    "gemma4_text": dict(
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=0,
        **_WINDOWED,
    ),
}

_EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=40)
# Mixtures of experts: 5 to 8 experts, 2 or 3 a token.
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2),
    "qwen2_moe": dict(_EXPERTS, num_experts=6, shared_expert_intermediate_size=48, norm_topk_prob=True),
    "qwen3_moe": dict(_EXPERTS, num_experts=8, head_dim=32, norm_topk_prob=True),
    "olmoe": dict(num_experts=5, num_experts_per_tok=3),
    "granitemoe": dict(num_local_experts=5, num_experts_per_tok=2, attention_multiplier=0.1, residual_multiplier=0.3),
    "phimoe": dict(num_local_experts=5, num_experts_per_tok=2),
    "deepseek_v2": dict(
        _EXPERTS,
        **_LATENT,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek_v3": dict(
        _EXPERTS,
        **_LATENT,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "gpt_oss": dict(
        num_local_experts=5,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
    "glm4_moe": dict(_EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, head_dim=16),
    "dots1": dict(_EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, head_dim=16),
    "ernie4_5_moe": dict(
        moe_num_experts=6, moe_k=2, moe_intermediate_size=40, moe_num_shared_experts=1, moe_layer_start_index=1
    ),
    "hunyuan_v1_moe": dict(num_experts=5, moe_topk=2, head_dim=16),
    "minimax_m2": dict(num_local_experts=6, num_experts_per_tok=2, head_dim=16),
    "granitemoeshared": dict(num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=48),
    "granitemoe_swa": dict(num_local_experts=5, num_experts_per_tok=2, **_WINDOWED),
    "solar_open": dict(
        _EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, head_dim=16
    ),
    "glm4_moe_lite": dict(
        _EXPERTS, **_LATENT, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2
    ),
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """Return the 2-layer config of `model_type`. Raises KeyError for a family not in `FAMILIES` or `MOE_FAMILIES`."""
    values = {**_BASE, **{**FAMILIES, **MOE_FAMILIES}[model_type]}
    defaults = {key: value for key, value in values.items() if value is not None}
    return AutoConfig.for_model(model_type, **(defaults | overrides))


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a float32 model on the CPU, in eval mode, whose weights depend on `seed` alone.

    Weights are scaled so that activations neither vanish nor saturate: greedy tokens then differ between prompts.

    Args:
        model_type: A key of `FAMILIES` or `MOE_FAMILIES`.
        seed: Seed of the weights.
        **overrides: Config values that replace the tiny defaults.
    """
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides), attn_implementation="eager")
    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim <= 1:
                parameter.add_(noise * 0.1)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise * 0.04)
            else:
                parameter.copy_(noise * (1.5 / math.sqrt(min(parameter.shape[-2:]))))
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():  # such as the bias of a router
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def save_tiny(
    model: PreTrainedModel, directory: Path, max_shard_size: str | None = None, tokenizer: bool = True
) -> Path:
    """Write `model` as a Hugging Face directory and return it.

    Args:
        model: A model from `tiny_model`.
        directory: Target folder, made if absent.
        max_shard_size: For example "60KB" to get several shards and an index; None for one file.
        tokenizer: Also write the byte-level tokenizer and its chat template.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size or "1GB")
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` (byte-level BPE, VOCAB_SIZE tokens) and `tokenizer_config.json` with a chat template."""
    (directory / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def byte_level_tokenizer() -> Any:
    """Return a `tokenizers.Tokenizer`: every byte is a token, so that any text encodes and may split characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _byte_characters()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    specials = [EOS_TOKEN, BOS_TOKEN, PAD_TOKEN]
    vocabulary.update({token: 256 + index for index, token in enumerate(specials)})
    merges = []
    for merge in _MERGES.split():
        left, right = merge.split("+")
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    assert len(vocabulary) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


_MERGES = (
    "t+h h+e i+n e+r a+n r+e o+n Ġ+t Ġ+a Ġ+s Ġ+w th+e Ġt+he an+d Ġ+and in+g e+n i+s o+u a+t e+s o+r Ġ+o Ġo+f Ġ+c "
    "l+l Ġ+h Ġ+b Ġ+p"
)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level BPE."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, spare = [], 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters
