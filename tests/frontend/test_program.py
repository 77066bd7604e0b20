"""What `load_program` hands over: the graph's form, its weights, and the model's facts."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.frontend.safetensors_file import StoredTensor
from llmbuild.builder.ir import INPUT_NAMES, Constant, source_line
from support.parity import relative_error
from support.tiny_models import BOS, EOS, PAD, VOCAB_SIZE, save_tiny, tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = tiny_model("llama")
    directory = save_tiny(model, tmp_path_factory.mktemp("llama"), max_shard_size="60KB")
    (directory / "notes.txt").write_text("not a part of the model")
    return model, directory


@pytest.fixture(scope="module")
def program(llama):
    return load_program(llama[1], dtype=torch.float32)


def placeholders(program):
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def test_inputs_come_first_then_one_placeholder_per_weight(program):
    names = [node.name for node in placeholders(program)]
    assert tuple(names[:3]) == INPUT_NAMES
    assert set(names[3:]) == set(program.weights)
    assert "model_layers_1_mlp_up_proj_weight" in names
    assert all(node.meta["val"].dtype is torch.int32 for node in placeholders(program)[:3])


def test_token_count_is_symbolic_and_logits_are_float32_rows(program):
    tokens, positions, rows = (node.meta["val"].shape[0] for node in placeholders(program)[:3])
    assert isinstance(tokens, torch.SymInt) and str(tokens) == str(positions) != str(rows)
    logits = program.graph.output_node().args[0].meta["val"]
    assert logits.dtype is torch.float32 and str(logits.shape[0]) == str(rows) and logits.shape[1] == VOCAB_SIZE


def test_graph_holds_only_functional_ops_without_guards(program):
    for node in program.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable and "assert" not in str(node.target)


def test_nodes_know_their_source_line(program):
    node = next(node for node in program.graph.nodes if "silu" in str(node.target))
    assert ".py:" in source_line(node)


def test_shapes_and_dtypes_of_placeholders_equal_their_weights(program):
    for node in placeholders(program)[3:]:
        expr, fake = program.weights[node.name], node.meta["val"]
        assert tuple(expr.shape) == tuple(fake.shape) and expr.dtype == fake.dtype


def test_no_weight_is_read_while_loading(llama, monkeypatch):
    def fail(self):
        raise AssertionError(f"{self.name} was read")

    monkeypatch.setattr(StoredTensor, "load", fail)
    load_program(llama[1], dtype=torch.float32)


def test_recomputed_buffers_equal_the_real_model(llama, program):
    model, _ = llama
    constants = {name: expr for name, expr in program.weights.items() if isinstance(expr, Constant)}
    assert list(constants) == ["model_rotary_emb_inv_freq"]
    assert torch.equal(constants["model_rotary_emb_inv_freq"].load(), model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("family", ["gemma", "gemma3_text", "gptj"])
def test_other_recomputed_buffers_equal_the_real_model(family, tmp_path):
    model = tiny_model(family)
    program = load_program(save_tiny(model, tmp_path, tokenizer=False), dtype=torch.float32)
    real = {name.replace(".", "_"): value for name, value in model.named_buffers()}
    constants = {name: expr for name, expr in program.weights.items() if isinstance(expr, Constant)}
    assert constants
    for name, expr in constants.items():
        assert torch.equal(expr.load(), real[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_share_one_placeholder(tied, tmp_path):
    model = tiny_model("llama", tie_word_embeddings=tied)
    program = load_program(save_tiny(model, tmp_path, tokenizer=False), dtype=torch.float32)
    table = program.placeholder("model_embed_tokens_weight")
    assert len(table.users) == (2 if tied else 1)
    assert ("lm_head_weight" in program.weights) is not tied


def test_bfloat16_is_passed_through_bit_exactly(tmp_path):
    model = tiny_model("llama").bfloat16()
    directory = save_tiny(model, tmp_path, tokenizer=False)
    stored = load_file(directory / "model.safetensors")
    program = load_program(directory, dtype=torch.bfloat16)
    weight = program.weights["model_layers_0_mlp_up_proj_weight"].load()
    original = stored["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype is torch.bfloat16 and torch.equal(weight.view(torch.int16), original.view(torch.int16))
    widened = load_program(directory, dtype=torch.float32).weights["model_layers_0_mlp_up_proj_weight"]
    assert widened.dtype is torch.float32 and torch.equal(widened.load(), original.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_graphs_follow_the_model(dtype, tmp_path):
    model = tiny_model("llama").to(dtype)
    program = load_program(save_tiny(model, tmp_path, tokenizer=False), dtype=dtype)
    assert relative_error(program, model.float()) < 0.05
    linear = next(node for node in program.graph.nodes if "linear" in str(node.target))
    assert linear.meta["val"].dtype is dtype
    assert program.weights["model_rotary_emb_inv_freq"].dtype is torch.float32


def test_info_names_the_files_that_were_read_with_their_hashes(llama, program):
    _, directory = llama
    recorded = {name: (size, digest) for name, size, digest in program.info.source_files}
    shards = sorted(file.name for file in directory.glob("*.safetensors"))
    assert len(shards) > 1 and {*shards, "config.json", "model.safetensors.index.json"} <= set(recorded)
    assert "notes.txt" not in recorded
    for name, (size, digest) in recorded.items():
        data = (directory / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)


def test_info_and_kv_geometry(program):
    info = program.info
    assert (info.architecture, info.vocab_size, info.hidden_size, info.num_layers) == (
        "LlamaForCausalLM",
        VOCAB_SIZE,
        64,
        2,
    )
    assert (info.bos_token_id, info.eos_token_ids, info.pad_token_id) == (BOS, (EOS,), PAD)
    layer = program.kv_layers[0]
    assert (layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.window) == (2, 16, 16, None)


def test_value_heads_may_be_narrower_than_keys(tmp_path):
    program = load_program(save_tiny(tiny_model("minicpm3"), tmp_path, tokenizer=False), dtype=torch.float32)
    assert {(layer.head_dim, layer.v_head_dim) for layer in program.kv_layers} == {(24, 16)}


def test_same_input_gives_the_same_program(llama, program):
    again = load_program(llama[1], dtype=torch.float32)
    assert str(again.graph) == str(program.graph)
    assert again.tokenizer_files == program.tokenizer_files and again.info == program.info
