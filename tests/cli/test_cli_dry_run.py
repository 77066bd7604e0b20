"""`llmbuild convert --dry-run`: the facts of a model, from its files' headers or from config.json alone."""

from __future__ import annotations

import json

from support.tiny_models import save_tiny, tiny_config, tiny_model


def test_a_config_alone_is_enough(tmp_path, invoke):
    tiny_config("llama").save_pretrained(tmp_path)
    result = invoke("convert", tmp_path, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    counts = {entry["name"]: entry["count"] for entry in found["passes"]}
    assert (counts["rope"], counts["rms_norm"], counts["merge_linears"]) == (4, 5, 4)
    assert found["unsupported"] == [] and found["weights_checked"] is False
    model = tiny_model("llama")
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["kv_bytes_per_token"] == 2 * 2 * (16 + 16) * 4  # layers, heads, k and v, float32
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_checkpoint_is_checked_but_not_read(tmp_path, invoke, monkeypatch):
    from llmbuild.builder.frontend import load

    directory = save_tiny(tiny_model("llama"), tmp_path / "m", tokenizer=False)
    monkeypatch.setattr(load, "hash_files", lambda files: (_ for _ in ()).throw(AssertionError("files were hashed")))
    result = invoke("convert", directory, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "names and shapes fit" in result.stdout and "converts" in result.stdout
    (directory / "model.safetensors").write_bytes(b"")
    assert invoke("convert", directory, "--dry-run").exit_code == 2


def test_what_is_refused_is_refused_dry_too(tmp_path, invoke):
    config = tiny_config("llama").to_dict() | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = invoke("convert", tmp_path, "--dry-run")
    assert result.exit_code == 2 and "spiral" in result.stderr


def test_without_dry_run_an_output_is_asked_for(tmp_path, invoke):
    result = invoke("convert", tmp_path)
    assert result.exit_code == 2 and "no engine directory is given" in result.stderr
