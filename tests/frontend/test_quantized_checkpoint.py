"""Quantized checkpoints through the frontend and the passes: their values and blocks reach the graph unchanged."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.quantizers.auto import AutoHfQuantizer

from llmbuild.builder.dry_run import dry_run
from llmbuild.builder.frontend import bind
from llmbuild.builder.frontend.load import load_program, open_source
from llmbuild.builder.options import BuildConfig, choose
from llmbuild.builder.pipeline import optimize
from llmbuild.errors import ConfigError, ModelError, UnsupportedError
from llmbuild.quantization.recipes import find_recipe
from support.parity import relative_error
from support.tiny_models import save_tiny, tiny_model
from support.tiny_quantized import STORED, Stored, describe, edit_tensors, gptq, gptq_config, save_quantized

UP = "model.layers.0.mlp.up_proj"
# One of each way to hold a weight; all are read bit for bit in tests/quantization/test_stored_formats.py.
QUICK = {"gptq", "gptq-v2-int8-channel", "awq", "pack-int4-zeros", "int-quantized-zeros", "fp8-blocks", "modelopt-fp8"}
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STORED]


def load(path):
    return load_program(path, dtype=torch.float32)


def count(program, op: str) -> int:
    return sum(str(node.target).startswith(f"llmbuild.{op}.") for node in program.graph.nodes)


@pytest.fixture(autouse=True)
def no_quantizer(monkeypatch):
    """transformers must not be asked for one: it would want the package that made the checkpoint."""

    def refuse(*args, **kwargs):
        raise AssertionError("transformers was asked to quantize")

    monkeypatch.setattr(AutoHfQuantizer, "from_config", refuse)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantized_model(name, tmp_path):
    stored = STORED[name]
    path, reference = save_quantized(tiny_model("llama"), tmp_path, stored)
    program = load(path)
    facts = program.rewrites[0].declined
    assert {f"14 weights stored as {stored.label}", *stored.notices} <= set(facts)
    assert program.info.quantized is not None and program.info.source_kind == "huggingface"
    files = {file for file, _, _ in program.info.source_files}
    assert ("hf_quant_config.json" in files) == (stored.modelopt is not None)
    for weight in program.weights.values():
        for source in weight.sources():
            if source.endswith("_proj.weight"):
                module = reference.get_submodule(source.removesuffix(".weight"))
                assert torch.equal(weight.load(), module.weight), source
    optimize(program, find_recipe("stored"))
    assert count(program, "linear_blockwise") == (0 if stored.blocks is None else 8)
    assert relative_error(program, reference) < 1e-5


def test_blocks_of_merged_linears_are_the_stored_ones(tmp_path):
    path, reference = save_quantized(tiny_model("llama"), tmp_path, STORED["gptq-zeros"])
    program = load(path)
    optimize(program, find_recipe("stored"))
    name = next(name for name in program.weights if "up" in name and name.endswith("_q") and "layers_0" in name)
    blocks = program.weights[name].source.load_blocks()
    mlp = reference.model.layers[0].mlp
    assert torch.equal(blocks.dequantize(), torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))


def test_the_recipe_none_dequantizes_and_others_do_not_round_again(tmp_path):
    path, reference = save_quantized(tiny_model("llama"), tmp_path, STORED["awq"])
    plain, again = load(path), load(path)
    optimize(plain, find_recipe("none"))
    assert count(plain, "linear_blockwise") == 0 and relative_error(plain, reference) < 1e-5
    optimize(again, find_recipe("int4-wo"))
    log = next(rewrite for rewrite in again.rewrites if rewrite.name == "choose_formats")
    assert any("kept in 4 bits as stored (AWQ int4, groups of 32)" in line for line in log.declined)


def test_experts_keep_their_blocks(tmp_path):
    path, reference = save_quantized(tiny_model("mixtral"), tmp_path, STORED["gptq"])
    program = load(path)
    optimize(program, find_recipe("stored"))
    assert count(program, "moe_experts_blockwise") == 2 and count(program, "moe_experts") == 0
    assert relative_error(program, reference) < 1e-5


def test_weights_that_transformers_assembles_are_dequantized_and_named(tmp_path, monkeypatch):
    path, reference = save_quantized(tiny_model("mixtral"), tmp_path, STORED["gptq"])
    monkeypatch.setattr(bind, "stacked_experts", lambda *args: None)
    program = load(path)
    told = "dequantized, as the model holds these weights in other matrices: model.layers.0."
    assert any(line.startswith(told) for line in program.rewrites[0].declined)
    optimize(program, find_recipe("stored"))
    assert count(program, "moe_experts_blockwise") == 0 and relative_error(program, reference) < 1e-5


# ------------------------------------------------------------------------------------------------ sorted columns
SORTED = Stored("", gptq_config(4, 32, True, desc_act=True), gptq(4, 32, sym=True, order=5), None)


def test_sorted_columns_are_dequantized_or_refused(tmp_path):
    path, reference = save_quantized(tiny_model("llama"), tmp_path, SORTED)
    program = load(path)
    with pytest.raises(UnsupportedError, match=r"columns were sorted .* in model\.layers\.0.* and 13 more") as caught:
        optimize(program, find_recipe("stored"))
    assert "--quant none dequantizes them exactly" in str(caught.value)
    optimize(program := load(path), find_recipe("none"))
    assert relative_error(program, reference) < 1e-5


# ------------------------------------------------------------------------------------------------------ choices
@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    return save_quantized(tiny_model("llama"), tmp_path_factory.mktemp("gptq"), STORED["gptq"])[0]


@pytest.fixture
def directory(quantized, tmp_path):
    """A private copy of a good checkpoint."""
    for file in quantized.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_what_is_stored_is_kept_by_default(directory, tmp_path):
    choices = choose(BuildConfig(directory, tmp_path / "out"))
    assert choices.quant == "stored"
    assert "quant stored: what the quantized checkpoint stores, kept as it is" in choices.notes
    assert choose(BuildConfig(directory, tmp_path / "out", quant="none")).quant == "none"
    with pytest.raises(ConfigError, match="the recipe 'gguf' keeps the blocks of a GGUF file"):
        choose(BuildConfig(directory, tmp_path / "out", quant="gguf"))


def test_the_recipe_stored_needs_a_quantized_checkpoint(tmp_path):
    path = save_tiny(tiny_model("llama"), tmp_path / "model", tokenizer=False)
    with pytest.raises(ConfigError, match="the recipe 'stored' keeps the weights of a quantized checkpoint, but model"):
        choose(BuildConfig(path, tmp_path / "out", quant="stored"))
    with pytest.raises(ConfigError, match="but 'model' is not quantized"):
        optimize(load(path), find_recipe("stored"))
    assert choose(BuildConfig(path, tmp_path / "out")).quant == "none"


def test_a_dry_run_tells_what_is_stored(directory, tmp_path):
    report = dry_run(BuildConfig(directory, tmp_path / "out"))
    assert report.unsupported == [] and report.weights_checked
    assert any("14 weights stored as GPTQ int4, groups of 32" in entry["declined"] for entry in report.passes)


def test_a_dry_run_needs_the_config_alone(directory, tmp_path):
    (directory / "model.safetensors").unlink()
    report = dry_run(BuildConfig(directory, tmp_path / "out"))
    assert not report.weights_checked and report.unsupported == []


# ------------------------------------------------------------------------------------------------ what is refused
def test_a_missing_tensor_is_named(directory):
    edit_tensors(directory, lambda tensors: tensors.pop(f"{UP}.scales"))
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\.0\.mlp\.up_proj\.scales' is missing"):
        load(directory)


def test_a_tensor_too_many_is_named(directory):
    edit_tensors(directory, lambda tensors: tensors.update({f"{UP}.workspace": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"1 tensor\(s\) of the checkpoint are unused .*: .*up_proj\.workspace"):
        load(directory)


def test_a_missing_module_is_named(directory):
    def edit(tensors):
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{UP}.{suffix}")

    edit_tensors(directory, edit)
    with pytest.raises(ModelError, match=r"missing from the checkpoint: model\.layers\.0\.mlp\.up_proj\.weight"):
        load(directory)


def test_a_weight_stored_twice_is_named(directory):
    edit_tensors(directory, lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(96, 64)}))
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.mlp\.up_proj' is stored both quantized and as it is"):
        load(directory)


def test_a_config_of_another_method_is_refused(directory):
    describe(directory, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(UnsupportedError, match="quantized by 'bitsandbytes', which llmbuild cannot read") as caught:
        load(directory)
    assert "known: gptq, awq, compressed-tensors, fp8, modelopt" in str(caught.value)


def test_a_config_that_describes_nothing_stored_says_so(tmp_path):
    path = save_tiny(tiny_model("llama"), tmp_path / "model", tokenizer=False)
    describe(path, gptq_config(4, 32, True))
    assert "no weight is stored quantized, although the config describes GPTQ" in load(path).rewrites[0].declined


def test_two_files_must_agree(directory):
    describe(directory, STORED["gptq"].config, {"quant_algo": "FP8"})
    with pytest.raises(ModelError, match=r"weights are quantized by gptq, hf_quant_config\.json by FP8"):
        load(directory)


def test_the_model_optimizer_describes_itself_in_either_file(tmp_path):
    stored = STORED["modelopt-int4"]
    path, _ = save_quantized(tiny_model("llama"), tmp_path, stored)
    both = {"quant_method": "modelopt", **stored.modelopt}
    describe(path, both)
    assert open_source(path).quantized == "ModelOpt"
    (path / "hf_quant_config.json").unlink()
    assert open_source(path).quantized == "ModelOpt"


def test_old_compressed_tensors_call_it_compression_config(tmp_path):
    path, _ = save_quantized(tiny_model("llama"), tmp_path, STORED["pack-int4"])
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw["compression_config"] = raw.pop("quantization_config")
    file.write_text(json.dumps(raw))
    source = open_source(path)
    assert source.quantized == "compressed-tensors" and not hasattr(source.config, "compression_config")


def test_a_float8_weight_without_its_scale_is_never_taken_as_it_is(tmp_path):
    path, _ = save_quantized(tiny_model("llama"), tmp_path, STORED["fp8-blocks"])
    edit_tensors(path, lambda tensors: tensors.pop(f"{UP}.weight_scale_inv"))
    with pytest.raises(
        ModelError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' holds 8-bit floats, but .* missing"
    ):
        load(path)


def test_scales_of_the_kv_cache_are_named(tmp_path):
    path, _ = save_quantized(tiny_model("llama"), tmp_path, STORED["modelopt-fp8"])
    name = "model.layers.0.self_attn.k_proj.k_scale"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.tensor(0.25)}))
    assert "not used yet: 1 tensors *.k_scale, scales of the KV cache" in load(path).rewrites[0].declined
