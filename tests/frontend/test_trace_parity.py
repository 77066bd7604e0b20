"""Traced graphs give the logits of transformers, for every family and the config switches that change attention."""

from __future__ import annotations

import pytest
import torch

from llmbuild.builder.frontend.load import load_program
from support.parity import relative_error
from support.tiny_models import FAMILIES, save_tiny, tiny_model

QUICK = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2"]
REST = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK]
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
VARIANTS = [
    ("llama", dict(rope_parameters=LLAMA3)),
    ("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    ("mistral", dict(sliding_window=None)),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)),
    *(
        pytest.param(name, options, marks=pytest.mark.slow)
        for name, options in (
            ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
            ("qwen3", dict(rope_parameters=YARN)),
            ("gpt2", dict(scale_attn_weights=False)),
            ("phi", dict(qk_layernorm=True)),
            ("phi3", dict(sliding_window=5, partial_rotary_factor=0.5)),
            ("stablelm", dict(qk_layernorm=True, use_parallel_residual=True)),
            ("gpt_neox", dict(use_parallel_residual=False)),
            ("cohere", dict(use_qk_norm=True)),
            ("olmo", dict(clip_qkv=0.5)),
            ("opt", dict(do_layer_norm_before=False)),
            ("opt", dict(word_embed_proj_dim=32)),
            ("gemma3_text", dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
        )
    ),
]


@pytest.mark.parametrize("family", [*QUICK, *REST])
def test_family(family, tmp_path):
    check(family, {}, tmp_path)


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_config_switch(family, options, tmp_path):
    check(family, options, tmp_path)


def check(family, options, directory):
    model = tiny_model(family, **options)
    save_tiny(model, directory, max_shard_size="60KB", tokenizer=False)
    program = load_program(directory, dtype=torch.float32)
    assert relative_error(program, model) < 1e-5
    assert len(program.kv_layers) == model.config.num_hidden_layers


def test_the_error_measure_sees_a_wrong_weight(tmp_path):
    model = tiny_model("llama")
    save_tiny(model, tmp_path, tokenizer=False)
    program = load_program(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3] += 0.05
    assert relative_error(program, model) > 1e-4
