"""Keys of config.json that transformers does not know: those that could change numerics are refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from llmbuild.builder.frontend.config_keys import check_keys
from llmbuild.builder.frontend.load import load_program
from llmbuild.errors import ConfigError, UnsupportedError
from support.families import FAMILIES, MOE_FAMILIES
from support.tiny_models import save_tiny, tiny_config, tiny_model


def check(family, ignored=(), **keys):
    config = AutoConfig.for_model(family)
    return check_keys({**config.to_dict(), **keys}, config, ignored)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_softcapping", 30.0),
        ("final_logit_softcap", 30.0),
        ("scale_emb", 12),
        ("residual_multiplier", 0.2),
        ("qk_norm", True),
        ("use_qk_norm", True),
        ("clip_qkv", 8.0),
        ("norm_type", "layernorm"),
        ("rope_interleave", True),
        ("rotary_pct", 0.5),
        ("attn_temperature_tuning", True),
        ("alibi", True),
        ("scoring_func", "sigmoid"),
        ("mup_scale", 0.5),
    ],
)
def test_a_key_that_speaks_of_computation_is_refused(key, value):
    with pytest.raises(UnsupportedError) as caught:
        check("llama", **{key: value})
    assert caught.value.what == f"config key(s) that transformers' LlamaConfig does not know: {key} = {value!r}"
    assert caught.value.hint == (
        "the model may need code that transformers does not have; if such a key changes nothing that is computed, "
        f"allow it: --ignore-config-key {key}"
    )


def test_all_are_named_at_once():
    with pytest.raises(UnsupportedError, match=r"(?m)know: scale_emb = 12, clip_qkv = 8\.0$") as caught:
        check("llama", scale_emb=12, clip_qkv=8.0, qk_norm=False)
    assert str(caught.value).endswith("--ignore-config-key scale_emb --ignore-config-key clip_qkv")


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}, 1, 1.0])
def test_values_that_switch_nothing_on_never_refuse(value):
    told = ["config keys that transformers does not know, taken as remarks: logit_scale"]
    assert check("llama", logit_scale=value) == (told if value else [])


# What published checkpoints carry beyond the config class of transformers.
CARRIED = {
    "llama": dict(
        rope_theta=5e5,
        torch_dtype="bfloat16",
        pretraining_tp=1,
        is_llama_config=True,
        rope_interleaved=False,
        temperature=0.6,
        unsloth_fixed=True,
        use_flash_attn=True,
        embd_pdrop=0.1,
    ),
    "phi3": dict(embd_pdrop=0.1, auto_map={"AutoConfig": "x.Y"}, rope_theta=1e4),
    "deepseek_v3": dict(
        ep_size=1,
        moe_layer_freq=1,
        num_nextn_predict_layers=1,
        aux_loss_alpha=1e-3,
        seq_aux=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    ),
    "gemma2": dict(hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid"),
    "qwen3_moe": dict(max_window_layers=48, router_aux_loss_coef=0.001),
    "gpt_oss": dict(experts_per_token=4, initial_context_length=4096),
    "gpt2": dict(n_ctx=1024, task_specific_params={"text-generation": {"max_length": 50}}, summary_type="cls_index"),
    "bloom": dict(attention_softmax_in_fp32=True, masked_softmax_fusion=True, offset_alibi=100, skip_bias_add=True),
    "opt": dict(prefix="</s>"),
    "mimo_v2_flash": dict(swa_head_dim=192),
}


@pytest.mark.parametrize("family", list(CARRIED))
def test_what_published_checkpoints_carry_is_accepted(family):
    check(family, **CARRIED[family])


def test_a_value_other_than_what_is_computed_anyway_is_refused():
    with pytest.raises(UnsupportedError, match="scoring_func = 'softmax'"):
        check("deepseek_v3", scoring_func="softmax")


def test_the_rest_is_told():
    assert check("llama", experts_per_token=4, prefix="x") == [
        "config keys that transformers does not know, taken as remarks: experts_per_token, prefix"
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_what_transformers_writes_is_known(family):
    config = tiny_config(family)
    check_keys(config.to_dict(), config)


def test_ignored_on_request():
    assert check("llama", ["clip_qkv"], clip_qkv=8.0) == ["config key clip_qkv = 8.0 ignored, as asked"]
    with pytest.raises(ConfigError) as caught:
        check("llama", ["clip_kqv"], clip_qkv=8.0)
    assert str(caught.value) == (
        "config.json has no key 'clip_kqv'\n  where: --ignore-config-key\n"
        "  next:  did you mean 'clip_qkv'? known: clip_qkv"
    )
    with pytest.raises(ConfigError, match="'rms_norm_eps' is one that LlamaConfig reads, so it cannot be ignored"):
        check("llama", ["rms_norm_eps"])


def test_a_model_directory_is_checked_and_the_report_tells(tmp_path):
    directory = save_tiny(tiny_model("llama"), tmp_path, tokenizer=False)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"clip_qkv": 8.0}))
    with pytest.raises(UnsupportedError, match=r"does not know: clip_qkv = 8\.0"):
        load_program(directory, dtype=torch.float32)
    program = load_program(directory, dtype=torch.float32, ignore_config_keys=["clip_qkv"])
    assert "config key clip_qkv = 8.0 ignored, as asked" in program.rewrites[0].declined


def test_a_gguf_file_has_no_keys_to_ignore(tmp_path):
    with pytest.raises(ConfigError, match=r"a GGUF file has no config\.json"):
        load_program(tmp_path / "m.gguf", dtype=torch.float32, ignore_config_keys=["a"])
