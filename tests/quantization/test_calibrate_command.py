"""`llmbuild calibrate`: statistics for later builds, merged ones, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from llmbuild.engine.hashing import sha256_file
from llmbuild.quantization.calibration.file import StatisticsFile
from support.tiny_models import save_tiny, tiny_model

TEXTS = {
    "one": "Forty winks, and then the rain came down on the roof of the old mill. " * 8,
    "two": "A quick brown fox jumps over nine lazy dogs; 7 of them do not notice at all. " * 8,
}


@pytest.fixture(scope="module")
def invoke() -> Callable[..., Any]:
    from llmbuild.cli.main import app

    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, invoke) -> Path:
    """A model, two texts, the statistics of each and both merged."""
    folder = tmp_path_factory.mktemp("calibrate")
    save_tiny(tiny_model("llama"), folder / "model")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
        words = ("--text", folder / f"{name}.txt", "--tokens", 200, "--json")
        result = invoke("calibrate", folder / "model", "-o", folder / f"{name}.stats", *words)
        assert result.exit_code == 0, result.stderr
    words = ("--from", folder / "one.stats", "--from", folder / "two.stats", "-o", folder / "both.stats")
    assert invoke("calibrate", *words).exit_code == 0
    return folder


def test_what_is_told_is_what_is_in_the_file(folder: Path, tmp_path: Path, invoke) -> None:
    words = ("--text", folder / "one.txt", "--tokens", 200)
    result = invoke("calibrate", folder / "model", "-o", tmp_path / "stats", *words, "--json")
    told = json.loads(result.stdout)
    assert told["sha256"] == sha256_file(tmp_path / "stats") == sha256_file(folder / "one.stats")
    assert told["bytes"] == (tmp_path / "stats").stat().st_size
    assert (told["model"], told["dtype"]) == ("model", "float32")
    assert [(text["source"], text["tokens"]) for text in told["texts"]] == [("one.txt", 200)]
    assert (told["inputs"], told["gram_matrices"]) == (4 * 2 + 1 + 4, 4 * 2)  # lm_head, keys and values: without
    shown = invoke("calibrate", folder / "model", "-o", tmp_path / "stats", *words, "--force")
    assert shown.exit_code == 0, shown.stderr
    assert told["sha256"][:16] in shown.stdout and "one.txt, 200 tokens" in shown.stdout


def test_a_recipe_without_gram_matrices_takes_less_space(folder: Path, tmp_path: Path, invoke) -> None:
    words = ("--text", folder / "one.txt", "--tokens", 200, "--quant", "int4-awq", "--json")
    told = json.loads(invoke("calibrate", folder / "model", "-o", tmp_path / "stats", *words).stdout)
    assert told["gram_matrices"] == 0
    assert told["bytes"] < (folder / "one.stats").stat().st_size


def test_merged_statistics_are_the_sums_of_both(folder: Path) -> None:
    one, two, both = (load_file(folder / f"{name}.stats") for name in ("one", "two", "both"))
    key = "model.layers.1.mlp.down_proj.weight"
    assert both[f"{key}.rows"][0] == one[f"{key}.rows"][0] + two[f"{key}.rows"][0] == 400
    assert both[f"{key}.absmax"].equal(torch.maximum(one[f"{key}.absmax"], two[f"{key}.absmax"]))
    torch.testing.assert_close(both[f"{key}.gram"], one[f"{key}.gram"] + two[f"{key}.gram"])
    texts = StatisticsFile(folder / "both.stats").description.texts
    assert [text.name for text in texts] == ["one.txt", "two.txt"]


@pytest.mark.parametrize("recipe", ["int4-gptq", "int4-awq"])
def test_an_engine_is_built_from_them_and_names_their_hash(folder: Path, tmp_path: Path, invoke, recipe: str) -> None:
    words = ("--quant", recipe, "--max-seq-len", 64, "--calibration", folder / "both.stats", "--json")
    result = invoke("convert", folder / "model", "-o", tmp_path / "e", *words)
    assert result.exit_code == 0, result.stderr
    recorded = json.loads((tmp_path / "e" / "engine.json").read_text())["build"]["options"]["calibration"]
    assert recorded["sha256"] == sha256_file(folder / "both.stats")
    assert [text["source"] for text in recorded["texts"]] == ["one.txt", "two.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model",), "no file of statistics is given"),
        (("-o", "x"), "neither a model nor files to merge are given"),
        (("model", "-o", "x", "--from", "one.stats"), "both a model and files to merge are given"),
        (("model", "-o", "one.stats"), "one.stats exists"),
        (("model", "-o", "no/x"), "there is no directory"),
        (("model", "-o", "x", "--quant", "int8-wo"), "recipe 'int8-wo' needs no calibration"),
        (("model", "-o", "x", "--quant", "int4-gtpq"), "unknown quantization recipe 'int4-gtpq'"),
        (("model", "-o", "x", "--dtype", "float23"), "unknown dtype 'float23'"),
        (("model", "-o", "x", "--text", "none.txt"), "there is no file none.txt"),
        (("model", "-o", "x", "--tokens", 1), "calibration_tokens is 1"),
        (("-o", "x", "--from", "one.stats"), "merging takes at least two files"),
        (("-o", "x", "--from", "one.stats", "--from", "one.txt"), "this is not a file of calibration statistics"),
        (("-o", "x", "--from", "one.stats", "--from", "none"), "this is not a file of calibration statistics"),
        (("-o", "x", "--from", "one.stats", "--from", "both.stats"), "both files are of the text one.txt"),
        (("-o", "x", "--from", "one.stats", "--from", "two.stats", "--tokens", 9), "merging runs no text"),
    ],
)
def test_what_is_refused(folder: Path, monkeypatch, invoke, words: tuple[object, ...], message: str) -> None:
    monkeypatch.chdir(folder)
    result = invoke("calibrate", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {message}" in result.stderr
    assert "\n  next:  " in result.stderr
    assert not (folder / "x").exists() and not (folder / "x.partial").exists()


def test_statistics_of_another_model_or_recipe_are_not_merged(folder: Path, tmp_path: Path, invoke) -> None:
    save_tiny(tiny_model("llama", seed=1), tmp_path / "other")
    for model, name, quant in ((tmp_path / "other", "other", "int4-gptq"), (folder / "model", "awq", "int4-awq")):
        words = ("--text", folder / "two.txt", "--tokens", 200, "--quant", quant)
        assert invoke("calibrate", model, "-o", tmp_path / f"{name}.stats", *words).exit_code == 0
    merging = ("calibrate", "-o", tmp_path / "x", "--from", folder / "one.stats", "--from")
    result = invoke(*merging, tmp_path / "other.stats")
    assert result.exit_code == 2 and "they are of the models model and other" in result.stderr
    result = invoke(*merging, tmp_path / "awq.stats")
    assert result.exit_code == 2
    assert "only one has a Gram matrix of the input of model.layers.0.mlp.down_proj.weight" in result.stderr
    words = ("--quant", "int4-gptq", "--max-seq-len", 64, "--calibration", folder / "one.stats")
    result = invoke("convert", tmp_path / "other", "-o", tmp_path / "e", *words)
    assert result.exit_code == 2 and "the statistics are of another model, model" in result.stderr
    assert not (tmp_path / "e").exists() and not (tmp_path / "x").exists()
