"""GGUF files: conventions inverted (proven on logits), blocks kept exactly, wrong files refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from llmbuild.builder.frontend.gguf_checkpoint import half_order
from llmbuild.builder.frontend.load import load_program, open_source
from llmbuild.errors import ModelError, UnsupportedError
from llmbuild.quantization.gguf_types import BLOCK_TYPES
from support.parity import relative_error
from support.tiny_gguf import write_gguf
from support.tiny_models import BOS, EOS, PAD, tiny_model

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
WIDE = dict(hidden_size=256, intermediate_size=256)  # K types have blocks of 256 columns


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
        ("llama", dict(head_dim=32)),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_logits_equal_the_hugging_face_model(family, options, tmp_path):
    model = tiny_model(family, **options)
    program = load_program(write_gguf(model, tmp_path / "tiny.gguf"), dtype=torch.float32)
    assert relative_error(program, model) < 1e-5
    assert program.info.source_kind == "gguf" and program.info.name == "tiny"
    assert (program.info.bos_token_id, program.info.eos_token_ids, program.info.pad_token_id) == (BOS, (EOS,), PAD)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_1", "Q6_K"])
def test_logits_of_stored_types(type_name, tmp_path):
    model = tiny_model("llama", **(WIDE if type_name.endswith("K") else {}))
    program = load_program(write_gguf(model, tmp_path / "tiny.gguf", type_name=type_name), dtype=torch.float32)
    assert relative_error(program, model) < 1e-5


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_blocks_stay_blocks_through_the_row_order(type_name, tmp_path):
    model = tiny_model("llama", **WIDE)
    checkpoint = open_source(write_gguf(model, tmp_path / "tiny.gguf", type_name=type_name)).checkpoint
    for name, parameter in model.named_parameters():
        expr = checkpoint.weight(name)
        assert torch.equal(expr.load(), parameter), name
        if parameter.ndim == 2:
            blocks = expr.load_blocks()
            assert expr.block_format == blocks.format and blocks.format.source == type_name
            assert torch.equal(blocks.dequantize(), parameter)
        else:
            assert expr.block_format is None


def test_blocks_stay_reachable_in_another_computation_dtype(tmp_path):
    model = tiny_model("llama")
    program = load_program(write_gguf(model, tmp_path / "tiny.gguf", type_name="Q8_0"), dtype=torch.bfloat16)
    expr = program.weights["model_layers_0_self_attn_q_proj_weight"]
    assert expr.dtype is torch.bfloat16 and expr.load().dtype is torch.bfloat16
    assert expr.block_format is not None
    assert torch.equal(expr.load_blocks().dequantize(), model.model.layers[0].self_attn.q_proj.weight)


def test_row_order_of_one_head():
    assert half_order(6, heads=1).tolist() == [0, 2, 4, 1, 3, 5]
    assert half_order(8, heads=2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_frequency_factors_are_llama3_scaling(tmp_path):
    model = tiny_model("llama", rope_parameters=LLAMA3)
    plain = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 4
    path = write_gguf(model, tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": factors})
    program = load_program(path, dtype=torch.float32)
    assert relative_error(program, model) < 1e-5


def test_linear_scaling(tmp_path):
    model = tiny_model("llama", rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    program = load_program(write_gguf(model, tmp_path / "tiny.gguf", metadata=keys), dtype=torch.float32)
    assert relative_error(program, model) < 1e-5


def test_config_values_are_the_decimals_that_were_meant(tmp_path):
    model = tiny_model("llama", rms_norm_eps=1e-5)
    config = open_source(write_gguf(model, tmp_path / "tiny.gguf")).config
    assert config.rms_norm_eps == 1e-5  # stored as float32 9.999999747378752e-06


# ---------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.sliding_window": 4096}, r"llama\.attention\.sliding_window = 4096 is not supported"),
        ({"expert_count": 8}, r"llama\.expert_count: mixtures of experts"),
        ({"rope.dimension_count": 8}, r"rope\.dimension_count = 8 differs from the head size 16"),
        ({"rope.scaling.type": "yarn"}, r"rope\.scaling\.type = 'yarn' is not supported"),
        ({"attention.head_count": [4, 2]}, r"llama\.attention\.head_count has one value per layer"),
    ],
)
def test_key_is_refused_by_name(metadata, message, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(UnsupportedError, match=message):
        open_source(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"embedding_length": None}, r"GGUF metadata lacks llama\.embedding_length"),
        ({"vocab_size": 300}, r"llama\.vocab_size is 300, but token_embd\.weight has 288 rows"),
    ],
)
def test_contradiction_is_named(metadata, message, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=message):
        open_source(path)


def test_unused_tensor_is_named_as_in_the_file(tmp_path):
    extra = {"blk.0.attn_rot_embd.weight": np.zeros(8, np.float32)}
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", extra_tensors=extra)
    with pytest.raises(ModelError, match=r"unused by the model: blk\.0\.attn_rot_embd\.weight"):
        load_program(path, dtype=torch.float32)


def test_other_architecture_is_refused_with_the_known_ones(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="GGUF architecture 'gemma2' is not supported") as caught:
        open_source(tmp_path / "x.gguf")
    assert "known: llama, qwen2, qwen3" in str(caught.value)


def test_unsupported_tensor_type_is_named(tmp_path):
    raw = np.zeros((4, 110), np.uint8)

    def add(writer):
        writer.add_tensor("blk.9.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q3_K)

    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", edit=add)
    with pytest.raises(UnsupportedError, match="GGUF tensor type Q3_K is not supported"):
        open_source(path)


@pytest.mark.parametrize("keep", [2, 100, 3000, -50_000])
def test_truncated_file_is_named(keep, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf is truncated or not a GGUF file"):
        open_source(path)


def test_other_files_are_not_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"hello, this is not a model at all" * 10)
    with pytest.raises(ModelError, match=r"x\.gguf is truncated or not a GGUF file"):
        open_source(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="does not exist"):
        open_source(tmp_path / "nowhere.gguf")


def test_split_file_is_refused(tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "a.gguf", edit=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(UnsupportedError, match="one part of a split GGUF file") as caught:
        open_source(path)
    assert "llama-gguf-split --merge" in str(caught.value)
