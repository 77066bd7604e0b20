"""Mixtures of experts, traced: the logits of transformers, an op a layer, and weights read expert by expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbuild.builder.frontend.bind import bind
from llmbuild.builder.frontend.fake_model import build_fake_model
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmbuild.builder.ir import Concat, Stack
from llmbuild.errors import ModelError
from support.parity import relative_error
from support.tiny_models import MOE_FAMILIES, save_tiny, tiny_config, tiny_model

QUICK = ("minimax_m2",)
SPARSE_LAYERS = {"deepseek_v2": 1, "deepseek_v3": 1, "glm4_moe": 1, "dots1": 1, "ernie4_5_moe": 1}  # else both


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MOE_FAMILIES]
)
def test_family(family: str, tmp_path: Path):
    model = tiny_model(family)
    program = load_program(save_tiny(model, tmp_path, tokenizer=False), dtype=torch.float32)
    calls = [node for node in program.graph.nodes if node.target is torch.ops.llmbuild.moe_experts.default]
    assert len(calls) == SPARSE_LAYERS.get(family, 2)
    assert relative_error(program, model) < 1e-5


def test_experts_are_stacked_without_reading_them(tmp_path: Path):
    """bfloat16 checkpoint, float32 model: each expert is cast alone, gate and up of one expert lie together."""
    model = tiny_model("qwen3_moe").to(torch.bfloat16)
    checkpoint = SafetensorsCheckpoint(save_tiny(model, tmp_path, tokenizer=False))
    binding = bind(build_fake_model(model.config, torch.float32).model, checkpoint, {})
    name = "model.layers.1.mlp.experts.gate_up_proj"
    fused = binding.weights[name]
    assert isinstance(fused, Stack) and len(fused.parts) == 8
    assert fused.parts[3].sources() == {f"model.layers.1.mlp.experts.3.{each}_proj.weight" for each in ("gate", "up")}
    assert fused.dtype == torch.float32
    assert torch.equal(fused.load(), model.state_dict()[name].float())


def test_a_missing_expert_is_named(tmp_path: Path):
    save_tiny(tiny_model("mixtral"), tmp_path, tokenizer=False)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "experts.2.w3" in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"gate_up_proj is incomplete: the checkpoint holds 5 of .*w1.*, 4 of .*w3"):
        load_program(tmp_path, dtype=torch.float32)


def test_experts_of_different_sizes_are_refused(tmp_path: Path):
    save_tiny(tiny_model("mixtral"), tmp_path, tokenizer=False)
    tensors = load_file(tmp_path / "model.safetensors")
    odd = next(name for name in tensors if "experts.2.w2" in name)
    tensors[odd] = tensors[odd][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"the experts of model\.layers\.0\.mlp\.experts\.down_proj have different"):
        load_program(tmp_path, dtype=torch.float32)


def test_an_expert_too_many_is_a_wrong_shape(tmp_path: Path):
    model = tiny_model("mixtral")
    save_tiny(model, tmp_path, tokenizer=False)
    config = tiny_config("mixtral", num_local_experts=4)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj: checkpoint \[5, 192, 64\], model \[4, 192, 64\]"):
        bind(build_fake_model(config, torch.float32).model, SafetensorsCheckpoint(tmp_path), {})


def test_a_stack_of_one_part_each_needs_no_concat(tmp_path: Path):
    checkpoint = SafetensorsCheckpoint(save_tiny(tiny_model("mixtral"), tmp_path, tokenizer=False))
    binding = bind(build_fake_model(tiny_config("mixtral"), torch.float32).model, checkpoint, {})
    down = binding.weights["model.layers.0.mlp.experts.down_proj"]
    up = binding.weights["model.layers.0.mlp.experts.gate_up_proj"]
    assert isinstance(down, Stack) and not any(isinstance(part, Concat) for part in down.parts)
    assert isinstance(up, Stack) and all(isinstance(part, Concat) for part in up.parts)
