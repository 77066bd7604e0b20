"""Thresholds of a build: what is written when they are kept, and what is left when they are missed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from llmbuild.builder.build import BuildConfig, build
from llmbuild.engine.reader import open_engine
from llmbuild.engine.verify import verify
from llmbuild.errors import AccuracyError, LLMBuildError, UserError
from support.fake_engine import tree
from support.tiny_gguf import write_gguf
from support.tiny_models import save_tiny, tiny_model

WORDS = ("--target", "cpu", "--max-seq-len", 128, "--accuracy-tokens", 200)


@pytest.fixture(scope="module")
def int4(llama, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "int4"
    config = BuildConfig(
        model=llama, output=out, target="cpu", quant="int4-wo", max_seq_len=128, max_kl=5.0, accuracy_tokens=200
    )
    report = build(config)
    assert report.accuracy is not None
    assert report.to_dict()["accuracy"] == report.accuracy
    assert report.seconds["accuracy"] > 0
    return out


def record_of(engine: Path) -> dict:
    return json.loads((engine / "report.json").read_text())["accuracy"]


def test_the_record_says_what_was_measured(int4: Path) -> None:
    record = record_of(int4)
    assert record["thresholds"] == {"max_kl": 5.0}
    assert (record["tokens"], record["predicted"]) == (200, 198)  # windows of 128 and of 72
    assert 1e-4 < record["kl"]["mean"] <= record["kl"]["p99"] <= record["kl"]["max"]
    assert 0 < record["top1"] <= 1
    assert record["perplexity"]["reference"] > 1
    assert record["text"]["source"].startswith("documentation strings of Python 3.")
    assert len(record["text"]["sha256"]) == 64
    assert record["unmatched"] == []
    kinds = [layer["kind"] for layer in record["layers"]]
    assert (kinds.count("attention"), kinds.count("block"), kinds.count("linear")) == (2, 2, 15)


def test_the_plot_is_a_file_of_the_engine(int4: Path) -> None:
    assert verify(int4) == []
    plot = open_engine(int4).file("accuracy.svg").read_text()
    assert plot.count("<title>") == len(record_of(int4)["layers"])
    assert "int4-wo" in plot


def test_twice_gives_the_same_bytes(int4: Path, llama: Path, tmp_path: Path, invoke) -> None:
    result = invoke("convert", llama, "-o", tmp_path / "again", "--quant", "int4-wo", "--max-kl", 5, *WORDS)
    assert result.exit_code == 0, result.stderr
    assert tree(tmp_path / "again") == tree(int4)
    for text in ("Accuracy: int4-wo against the unquantized model", "same best token", "Layers that err most"):
        assert text in result.stdout


def test_inspect_shows_the_figures(int4: Path, invoke) -> None:
    shown = invoke("inspect", int4)
    assert shown.exit_code == 0, shown.stderr
    record = record_of(int4)
    assert "Accuracy: int4-wo against the unquantized model, when it was built" in shown.stdout
    assert f"mean {record['kl']['mean']:g}, p99" in shown.stdout
    assert record["text"]["sha256"][:16] in shown.stdout
    assert max(record["layers"], key=lambda layer: layer["own"])["name"] in shown.stdout
    assert json.loads(invoke("inspect", int4, "--json").stdout)["report"]["accuracy"] == record


def test_without_thresholds_nothing_is_measured(llama: Path, tmp_path: Path, invoke) -> None:
    result = invoke("convert", llama, "-o", tmp_path / "e", "--quant", "int4-wo", "--max-seq-len", 64)
    assert result.exit_code == 0, result.stderr
    assert "accuracy" not in json.loads((tmp_path / "e" / "report.json").read_text())
    assert not (tmp_path / "e" / "accuracy.svg").exists()
    assert "Accuracy" not in invoke("inspect", tmp_path / "e").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-kl", "1e-6"), " is above --max-kl 1e-06"),
        (("--min-top1", "1"), " is below --min-top1 1"),
        (("--max-ppl-increase", "0", "--max-kl", "0"), "mean KL "),
    ],
)
def test_missed_thresholds_are_exit_3_and_leave_nothing(
    llama: Path, tmp_path: Path, invoke, words: tuple[str, ...], message: str
) -> None:
    result = invoke("convert", llama, "-o", tmp_path / "e", "--quant", "int4-wo", *WORDS, *words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.splitlines()[-3].startswith("error: too far from the unquantized model: ")
    assert message in result.stderr
    assert "\n  where: worst layers: model.layers." in result.stderr
    assert "--exclude 'model.layers." in result.stderr
    assert "--quant int8-wo" in result.stderr
    assert os.listdir(tmp_path) == []


def test_missed_as_json(llama: Path, tmp_path: Path, invoke) -> None:
    words = ("--quant", "int4-wo", "--max-kl", 0, "--json")
    result = invoke("convert", llama, "-o", tmp_path / "e", *WORDS, *words)
    assert (result.exit_code, result.stdout) == (3, "")
    error = json.loads(result.stderr.splitlines()[-1])["error"]
    assert error["kind"] == "AccuracyError"
    assert "worst layers" in error["where"]


def test_what_the_hint_says_helps(llama: Path, tmp_path: Path, invoke) -> None:
    """Leaving the worst out, as the message says, makes the KL smaller."""
    words = ("convert", llama, "-o", tmp_path / "e", "--quant", "int4-wo", *WORDS, "--max-kl")
    failed = invoke(*words, 0)
    hint = failed.stderr.split("leave the worst out: ")[1].split(";")[0]
    excluded = [word.strip("'") for word in hint.split()]
    assert excluded[0] == "--exclude"
    assert invoke(*words, 5, *excluded).exit_code == 0
    measured = float(failed.stderr.split("mean KL ")[1].split()[0])
    assert record_of(tmp_path / "e")["kl"]["mean"] < measured


def test_no_quantization_keeps_any_threshold(llama: Path, tmp_path: Path, invoke) -> None:
    words = ("--max-kl", "1e-6", "--max-ppl-increase", "1e-5", "--min-top1", "1")
    result = invoke("convert", llama, "-o", tmp_path / "e", "--quant", "none", *WORDS, *words)
    assert result.exit_code == 0, result.stderr
    record = record_of(tmp_path / "e")
    assert record["kl"] == {"mean": 0.0, "p99": 0.0, "max": 0.0}
    assert record["top1"] == 1.0


def test_blocks_of_a_gguf_are_what_the_model_is(tmp_path: Path, invoke) -> None:
    model = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", type_name="Q8_0")
    result = invoke("convert", model, "-o", tmp_path / "e", *WORDS, "--max-kl", "1e-6")
    assert result.exit_code == 0, result.stderr


def test_a_text_of_ones_own(llama: Path, tmp_path: Path, invoke) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "the cat sat"}\n{"text": "on the mat"}\n')
    result = invoke("convert", llama, "-o", tmp_path / "e", "--quant", "int8-wo", "--accuracy-text", text)
    assert result.exit_code == 0, result.stderr
    record = record_of(tmp_path / "e")
    expected = hashlib.sha256(b"the cat sat\n\non the mat").hexdigest()
    assert record["text"] == {"source": "text.jsonl", "sha256": expected}
    assert record["tokens"] < 23
    assert record["thresholds"] == {}


def test_less_memory_gives_the_same_figures(int4: Path, llama: Path, tmp_path: Path, invoke) -> None:
    """With --max-memory weights are not held; the engine is the same."""
    words = ("--quant", "int4-wo", "--max-kl", 5, "--max-memory", "64GB")
    result = invoke("convert", llama, "-o", tmp_path / "e", *WORDS, *words)
    assert result.exit_code == 0, result.stderr
    assert tree(tmp_path / "e") == tree(int4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-kl", "-1"), "max_kl is -1.0"),
        (("--min-top1", "90"), "min_top1 is 90.0"),
        (("--accuracy-text", "none.txt"), "there is no file none.txt"),
        (("--accuracy-tokens", "1"), "accuracy_tokens is 1"),
        (("--max-kl", "1", "--dry-run"), "a dry run reads no weights"),
    ],
)
def test_bad_options_are_exit_2(llama: Path, tmp_path: Path, invoke, words: tuple[str, ...], message: str) -> None:
    result = invoke("convert", llama, "-o", tmp_path / "e", "--max-seq-len", 64, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {message}" in result.stderr
    assert "\n  next:  " in result.stderr
    assert os.listdir(tmp_path) == []


def test_a_model_without_a_tokenizer(tmp_path: Path, invoke) -> None:
    model = save_tiny(tiny_model("llama"), tmp_path / "model", tokenizer=False)
    result = invoke("convert", model, "-o", tmp_path / "e", "--max-kl", 1)
    assert result.exit_code == 2
    assert "the model has no tokenizer" in result.stderr


def test_the_error_is_not_the_users_mistake() -> None:
    assert issubclass(AccuracyError, LLMBuildError) and not issubclass(AccuracyError, UserError)
