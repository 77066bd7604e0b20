"""`llmbuild accuracy`: engines as they run, against their models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmbuild.builder.build import BuildConfig, build
from support.tiny_models import save_tiny, tiny_model


@pytest.fixture(scope="module")
def engines(llama, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("engines")
    for quant in ("none", "int4-wo"):
        limits = {"max_seq_len": 96, "max_num_tokens": 24, "max_batch_size": 2}
        build(BuildConfig(model=llama, output=folder / quant, target="cpu", quant=quant, **limits))
    return {quant: folder / quant for quant in ("none", "int4-wo")}


def measured(invoke, engine: Path, model: Path, *words: object) -> dict:
    result = invoke("accuracy", engine, "--against", model, "--tokens", 150, "--json", *words)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_an_unquantized_engine_is_its_model(engines, llama, invoke) -> None:
    told = measured(invoke, engines["none"], llama, "--max-kl", "1e-6", "--min-top1", 1)
    assert told["kl"]["mean"] == 0.0 and told["kl"]["max"] < 1e-5
    assert told["top1"] == 1.0
    assert told["perplexity"]["increase"] == pytest.approx(0, abs=1e-5)
    assert (told["tokens"], told["predicted"]) == (150, 148)
    assert (told["model"], told["target"], told["quant"]) == ("llama", "cpu", "none")
    assert told["thresholds"] == {"max_kl": 1e-6, "min_top1": 1.0}


def test_an_int4_engine_is_not_and_its_figures_are_the_oracles(engines, llama, tmp_path, invoke) -> None:
    told = measured(invoke, engines["int4-wo"], llama)
    assert told["kl"]["mean"] > 1e-4
    config = BuildConfig(
        model=llama, output=tmp_path / "e", target="cpu", quant="int4-wo", max_seq_len=96, accuracy_tokens=150
    )
    oracle = build(config).accuracy
    assert oracle is not None
    assert told["text"] == {**oracle["text"]}
    assert told["kl"]["mean"] == pytest.approx(oracle["kl"]["mean"], rel=0.05)
    assert told["perplexity"]["candidate"] == pytest.approx(oracle["perplexity"]["candidate"], rel=0.01)


def test_thresholds_are_exit_3(engines, llama, invoke) -> None:
    words = ("accuracy", engines["int4-wo"], "--against", llama, "--tokens", 100)
    result = invoke(*words, "--max-kl", 0)
    assert result.exit_code == 3
    assert "Accuracy: " in result.stdout and "perplexity" in result.stdout
    assert "error: too far from the unquantized model: mean KL " in result.stderr
    assert "next:  choose a recipe with more bits: --quant int8-wo" in result.stderr
    as_json = invoke(*words, "--max-kl", 0, "--json")
    assert as_json.exit_code == 3
    assert json.loads(as_json.stdout)["kl"]["mean"] > 0
    assert json.loads(as_json.stderr.splitlines()[-1])["error"]["kind"] == "AccuracyError"
    assert invoke(*words, "--max-kl", 50).exit_code == 0


def test_a_text_of_ones_own(engines, llama, tmp_path, invoke) -> None:
    (tmp_path / "t.txt").write_text("the cat sat on the mat and the mat sat on the cat")
    told = measured(invoke, engines["none"], llama, "--text", tmp_path / "t.txt")
    assert told["text"]["source"] == "t.txt"
    assert told["tokens"] < 50


def test_another_model_is_refused(engines, tmp_path, invoke) -> None:
    small = save_tiny(tiny_model("llama", vocab_size=320), tmp_path / "small")
    result = invoke("accuracy", engines["none"], "--against", small)
    assert result.exit_code == 2
    assert "small 320: it was not made from it" in result.stderr


def test_another_tokenizer_is_refused(engines, llama, tmp_path, invoke) -> None:
    other = save_tiny(tiny_model("llama"), tmp_path / "other")
    definition = json.loads((other / "tokenizer.json").read_text())
    definition["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(definition))
    result = invoke("accuracy", engines["none"], "--against", other)
    assert result.exit_code == 2
    assert "the tokenizers of the engine and of other give different tokens" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "1"), "--tokens"),
        (("--max-kl", "-1"), "max_kl is -1.0"),
        (("--text", "none.txt"), "there is no file none.txt"),
    ],
)
def test_bad_options(engines, llama, invoke, words, message) -> None:
    result = invoke("accuracy", engines["none"], "--against", llama, *words)
    assert result.exit_code == 2
    assert message in result.stderr
