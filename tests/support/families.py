"""What makes a tiny model of each decoder family of transformers, beyond the sizes that all share."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 288  # 256 bytes, 3 special tokens, 29 merges

_WINDOWED: dict[str, Any] = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
KINDS = ("full_attention", "sliding_attention")
# One rotary base for each kind of layer.
_TWO_BASES: dict[str, Any] = dict(
    full_attention=dict(rope_type="default", rope_theta=5e5),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)
# Full layers rotate half of each head.
_HALF_TURNED: dict[str, Any] = _TWO_BASES | dict(
    full_attention=dict(_TWO_BASES["full_attention"], partial_rotary_factor=0.5)
)
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
    # Text halves of multimodal families.
    "apertus1p5_text": {},
    "cohere_compass_text": dict(
        head_dim=16, rope_parameters={kind: dict(rope_type="default", rope_theta=1e4) for kind in KINDS}, **_WINDOWED
    ),
    "gemma4_unified_text": dict(head_dim=16, global_head_dim=16, num_kv_shared_layers=0, **_WINDOWED),
    "gemma3n_text": dict(  # several streams of activations, sparse activations, an embedding for each layer
        head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=0,
        laurel_rank=8,
        altup_num_inputs=2,
        intermediate_size=[96, 96],
        activation_sparsity_pattern=[0.95, 0.0],
        **_WINDOWED,
    ),
    "modernbert-decoder": dict(local_attention=6, num_key_value_heads=None, layer_types=_WINDOWED["layer_types"]),
}

_EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=40)
_ONE_SPARSE: dict[str, Any] = dict(_EXPERTS, mlp_layer_types=["dense", "sparse"])
_SHARED: dict[str, Any] = dict(
    _EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1
)
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
    "llama4_text": dict(  # one expert a token, its input scaled instead of its output; layers without rope
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        intermediate_size=40,
        intermediate_size_mlp=96,
        attention_chunk_size=128,
        no_rope_layers=[1, 0],
        floor_scale=4,
    ),
    "flex_olmo": dict(num_experts=5, num_experts_per_tok=2),
    "afmoe": dict(
        _EXPERTS,
        num_experts=8,
        head_dim=16,
        num_dense_layers=1,
        num_shared_experts=1,
        route_scale=1.5,
        mup_enabled=True,
        **_WINDOWED,
    ),
    "hy_v3": dict(_ONE_SPARSE, num_experts=8, num_shared_experts=1, head_dim=16, router_scaling_factor=1.5),
    "mellum": dict(_ONE_SPARSE, num_local_experts=8, head_dim=16, rope_parameters=_TWO_BASES, **_WINDOWED),
    "laguna": dict(  # layers with different numbers of heads, a gate on what attention gives
        _ONE_SPARSE,
        num_experts=8,
        head_dim=16,
        shared_expert_intermediate_size=48,
        num_attention_heads_per_layer=[4, 6],
        moe_routed_scaling_factor=1.5,
        rope_parameters=_HALF_TURNED,
        **_WINDOWED,
    ),
    "axk1": dict(_SHARED, **_LATENT, mlp_layer_types=["dense", "sparse"], routed_scaling_factor=1.5),
    "mimo_v2_flash": dict(  # values narrower than keys and scaled, sinks in windowed layers
        _ONE_SPARSE,
        n_routed_experts=8,
        head_dim=24,
        v_head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=1,
        swa_head_dim=24,
        swa_v_head_dim=16,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "exaone_moe": dict(
        _ONE_SPARSE, num_experts=8, num_shared_experts=1, n_group=2, topk_group=1, head_dim=16, **_WINDOWED
    ),
    "cohere2_moe": dict(
        _EXPERTS,
        num_experts=6,
        num_shared_experts=1,
        head_dim=16,
        logit_scale=0.5,
        expert_selection_fn="sigmoid",
        **_WINDOWED,
    ),
    "sarvam_moe": dict(_SHARED, head_dim=16),
    "sarvam_mla": dict(_SHARED, **_LATENT),
    "aria_text": dict(moe_num_experts=6, moe_topk=2, moe_num_shared_experts=1, head_dim=16, intermediate_size=40),
    "flint": dict(
        _EXPERTS, num_experts=8, head_dim=16, shared_expert_intermediate_size=48, mlp_only_layers=[0], **_WINDOWED
    ),
    "kolibri1": dict(
        _EXPERTS,
        num_local_experts=8,
        head_dim=16,
        shared_expert_intermediate_size=48,
        intermediate_size=None,
        **_WINDOWED,
    ),
    "beam": dict(
        _ONE_SPARSE,
        num_experts=8,
        head_dim=16,
        n_group=2,
        topk_group=1,
        rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=1e4), full_attention=None),
        **_WINDOWED,
    ),
    "minimax_m3_vl_text": dict(
        _ONE_SPARSE,
        num_local_experts=6,
        head_dim=16,
        dense_intermediate_size=96,
        shared_intermediate_size=48,
        rotary_dim=8,
        layer_types=["full_attention", "full_attention"],
    ),
    "granitemoehybrid": dict(
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        layer_types=["attention", "attention"],
        position_embedding_type="rope",
        attention_multiplier=0.1,
        residual_multiplier=0.3,
    ),
}
