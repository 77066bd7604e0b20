"""What a wrong model directory says: each text names the fact and what to do."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from llmbuild.builder.frontend.contract import check_attention, check_config
from llmbuild.builder.frontend.fake_model import build_fake_model
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.frontend.trace import trace
from llmbuild.errors import ModelError, UnsupportedError
from support.tiny_models import save_tiny, tiny_config, tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tiny_model("llama"), tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.fixture
def directory(saved, tmp_path):
    """A private copy of a good model directory."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(directory):
    return load_program(directory, dtype=torch.float32)


def edit_weights(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory, **values):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))


# ------------------------------------------------------------------------------------------------- directory
def test_path_that_does_not_exist(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere' is not a model directory or a \.gguf file"):
        load(tmp_path / "nowhere")


def test_directory_without_config(tmp_path):
    with pytest.raises(ModelError, match=r"is not a model directory: it has no config\.json") as caught:
        load(tmp_path)
    assert "give a Hugging Face model directory, or a .gguf file" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "not a JSON object"), ("{}", r"config\.json has no model_type")],
)
def test_unreadable_config(text, message, directory):
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        load(directory)


def test_unknown_model_type_is_named(directory):
    edit_config(directory, model_type="llama9")
    with pytest.raises(UnsupportedError, match="cannot read model type 'llama9'"):
        load(directory)


def test_remote_code_is_never_run_unasked(directory):
    edit_config(directory, model_type="custom", auto_map={"AutoConfig": "code.Config"})
    (directory / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedError, match="cannot read model type 'custom'") as caught:
        load(directory)
    assert "--trust-remote-code" in str(caught.value)


# --------------------------------------------------------------------------------------------------- tensors
def test_missing_tensor_is_named(directory):
    edit_weights(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"1 tensor\(s\) missing from the checkpoint: model\.layers\.1\.mlp\."):
        load(directory)


def test_unused_tensor_is_named(directory):
    edit_weights(directory, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"1 tensor\(s\) of the checkpoint are unused .*: model\.extra\.weight"):
        load(directory)


def test_a_layer_too_many_is_unused(directory):
    edit_config(directory, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"9 tensor\(s\) of the checkpoint are unused .* and 1 more"):
        load(directory)


def test_wrong_shape_is_named(directory):
    edit_weights(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(ModelError, match=r"of the wrong shape: model\.norm\.weight: checkpoint \[65\], model \[64\]"):
        load(directory)


def test_all_problems_are_reported_at_once(directory):
    def edit(tensors):
        tensors["other.weight"] = tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = torch.zeros(2, 2)

    edit_weights(directory, edit)
    with pytest.raises(ModelError, match=r"missing.*model\.norm\.weight.*unused.*other\.weight.*: lm_head\.weight"):
        load(directory)


def test_untied_head_must_be_stored(directory):
    edit_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing from the checkpoint: lm_head\.weight") as caught:
        load(directory)
    assert "tie_word_embeddings = false" in str(caught.value)


def without_key(directory, key):
    config = json.loads((directory / "config.json").read_text())
    del config[key]
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_a_config_that_says_nothing_follows_its_class(family, tmp_path):
    """GemmaConfig ties by default, LlamaConfig does not."""
    directory = save_tiny(tiny_model(family, tie_word_embeddings=True), tmp_path, tokenizer=False)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    without_key(directory, "tie_word_embeddings")
    if family == "gemma":
        program = load(directory)
        assert len(program.placeholder("model_embed_tokens_weight").users) == 2
    else:
        with pytest.raises(ModelError, match=r"missing from the checkpoint: lm_head\.weight"):
            load(directory)


def test_untied_weights_are_never_shared(directory):
    """Equal values or not: what config.json calls untied stays two weights."""
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    program = load(directory)
    assert {"lm_head_weight", "model_embed_tokens_weight"} <= set(program.weights)
    assert program.weights["lm_head_weight"].sources() == {"lm_head.weight"}


def test_the_index_is_checked_before_any_work(directory, monkeypatch):
    """A missing shard stops the build before the model is made, not when its tensor is read."""
    from llmbuild.builder.frontend import load as loading

    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(loading, "build_fake_model", lambda *_, **__: pytest.fail("the model was made"))
    with pytest.raises(ModelError, match=r"missing shard: model-00001-of-00002\.safetensors"):
        load(directory)


def test_tied_by_config_and_stored_once(directory):
    edit_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))
    edit_config(directory, tie_word_embeddings=True)
    assert "lm_head_weight" not in load(directory).weights


def test_tied_by_config_but_stored_with_two_values_is_not_tied(directory):
    edit_config(directory, tie_word_embeddings=True)
    program = load(directory)
    assert {"lm_head_weight", "model_embed_tokens_weight"} <= set(program.weights)
    assert any("not tied" in note for note in program.rewrites[0].declined)


def test_tied_by_config_and_stored_twice_is_held_once(directory):
    edit_config(directory, tie_word_embeddings=True)
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head_weight" not in load(directory).weights


def test_recomputed_buffers_in_old_checkpoints_are_ignored_with_a_notice(directory):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(directory, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert load(directory).rewrites[0].declined == [f"ignored, as transformers does: {name}"]


# ---------------------------------------------------------------------------------------------------- config
CONFIGS = [
    ("llama", dict(rope_parameters=dict(rope_type="spiral", rope_theta=1e4, factor=2.0)), "rope_type is 'spiral'"),
    ("llama", dict(quantization_config={"quant_method": "gptq", "bits": 4}), r"already quantized .*'gptq'"),
    ("llama", dict(is_encoder_decoder=True), "is_encoder_decoder = True: only decoder-only"),
    ("llama", dict(vision_config={"hidden_size": 8}), "vision_config: only text models"),
    ("llama", dict(attention_chunk_size=16), "attention_chunk_size = 16: chunked attention"),
]


@pytest.mark.parametrize(("family", "values", "message"), CONFIGS)
def test_config_key_is_refused_by_name(family, values, message):
    with pytest.raises(UnsupportedError, match=message):
        check_config(tiny_config(family, **values))


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("lfm2", dict(layer_types=["conv", "full_attention"]), "layer_types holds 'conv'"),
        (
            "qwen3_next",
            dict(layer_types=["linear_attention", "full_attention"]),
            "layer_types holds 'linear_attention'",
        ),
        (
            "jetmoe",
            dict(num_local_experts=4),
            "num_local_experts = 4: its experts are not behind transformers' experts",
        ),
        ("mamba", {}, "'linear_attention'"),
        ("t5", {}, "is_encoder_decoder"),
        ("bert", {}, "attention is not causal"),
        ("diffllama", {}, r"4 attention ops for 2 layers \(layers with several: \[0, 1\]\)"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(family, values, message):
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    config = AutoConfig.for_model(family, **{**sizes, **values})
    with pytest.raises(UnsupportedError, match=message):
        trace(build_fake_model(config, torch.float32))


def test_a_layer_without_attention_is_found_in_the_graph():
    config = AutoConfig.for_model(
        "lfm2", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    graph = trace(build_fake_model(config, torch.float32)).graph
    config.num_hidden_layers = 3
    with pytest.raises(UnsupportedError, match=r"2 attention ops for 3 layers \(layers without: \[2\]\)"):
        check_attention(graph, config)


def test_a_window_that_the_config_contradicts_is_refused():
    config = tiny_config("gemma2")
    graph = trace(build_fake_model(config, torch.float32)).graph
    config.layer_types = ["full_attention", "full_attention"]
    with pytest.raises(UnsupportedError, match="layer 0 attends over a window of 6, but the config says None"):
        check_attention(graph, config)
    config = tiny_config("llama")
    graph = trace(build_fake_model(config, torch.float32)).graph
    config.sliding_window = 6
    with pytest.raises(UnsupportedError, match="sliding_window = 6 does not reach attention"):
        check_attention(graph, config)
