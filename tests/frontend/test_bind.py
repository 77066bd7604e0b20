"""Checkpoint names follow transformers' own rules: prefixes, renames, and weights assembled from several tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from llmbuild.builder.frontend.bind import bind
from llmbuild.builder.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmbuild.errors import ModelError
from support.tiny_models import save_tiny, tiny_model


def fake(config):
    with FakeTensorMode():
        return AutoModelForCausalLM.from_config(config)


def test_fused_experts_are_assembled_from_single_ones(tmp_path):
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    stored = SafetensorsCheckpoint(tmp_path)
    assert any("experts.3.down_proj" in name for name in stored.names())
    binding = bind(fake(config), stored, {})
    state = model.state_dict()
    assert set(binding.weights) == set(state)
    for name, expr in binding.weights.items():
        assert tuple(expr.shape) == tuple(state[name].shape)
        assert torch.equal(expr.load(), state[name]), name
    fused = next(expr for name, expr in binding.weights.items() if name.endswith("experts.gate_up_proj"))
    assert len(fused.sources()) == 8


def test_checkpoint_of_the_base_model_gets_its_prefix(tmp_path):
    model = tiny_model("gpt2")
    save_tiny(model, tmp_path, tokenizer=False)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    assert "h.0.attn.c_attn.weight" in bare
    save_file(bare, tmp_path / "model.safetensors")
    binding = bind(fake(model.config), SafetensorsCheckpoint(tmp_path), {"lm_head.weight": "transformer.wte.weight"})
    assert torch.equal(binding.weights["transformer.h.0.attn.c_attn.weight"].load(), tensors[MERGED])
    assert binding.aliases == {"lm_head.weight": "transformer.wte.weight"}


MERGED = "transformer.h.0.attn.c_attn.weight"


def test_two_tensors_for_one_weight_are_refused(tmp_path):
    model = tiny_model("gpt2")
    save_tiny(model, tmp_path, tokenizer=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["h.0.attn.c_attn.weight"] = tensors[MERGED].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"two tensors of the checkpoint are the model's '{MERGED}'"):
        bind(fake(model.config), SafetensorsCheckpoint(tmp_path), {})
