"""`llmbuild autoquant`: what is found is what an engine is built with, and it keeps the bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmbuild.builder.quant_config import read_quant_config
from llmbuild.engine.reader import open_engine
from support.tiny_models import save_tiny, tiny_model

HARD = "model.layers.0.mlp.down_proj"
FEW = ("--sensitivity-tokens", 64, "--accuracy-tokens", 128)
MAX_KL = 0.15


@pytest.fixture(scope="module")
def found(outliers: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A search over int4-wo and int8-wo in which all but the hard layer could be in 4 bits."""
    from typer.testing import CliRunner

    from llmbuild.cli.main import app

    out = tmp_path_factory.mktemp("found") / "q.json"
    words = ["autoquant", outliers, "-o", out, "--max-kl", MAX_KL, "--candidates", "int4-wo,int8-wo", *FEW, "--json"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.stderr
    return out, json.loads(result.stdout)


def test_the_layer_that_is_hard_to_round_stays_in_more_bits(found) -> None:
    _, told = found
    chosen = {unit["name"]: unit["recipe"] for unit in told["units"]}
    assert chosen[HARD] == "int8-wo"
    assert list(chosen.values()).count("int4-wo") >= 2
    alone = {unit["name"]: unit["kl_alone"]["int4-wo"] for unit in told["units"]}
    assert max(alone, key=alone.__getitem__) == HARD


def test_an_engine_of_the_config_keeps_the_bound(found, outliers: Path, tmp_path: Path, invoke) -> None:
    """Measured by convert, over the same text: the same figure. And what is recorded is what was chosen."""
    config, told = found
    kl = told["chosen"]["kl"]["mean"]
    assert 0 < kl <= MAX_KL
    words = ("--max-seq-len", 128, "--accuracy-tokens", 128, "--max-kl", MAX_KL)
    result = invoke("convert", outliers, "-o", tmp_path / "e", "--target", "cpu", "--quant-config", config, *words)
    assert result.exit_code == 0, result.stderr
    engine = open_engine(tmp_path / "e")
    record = json.loads(engine.file("report.json").read_text())["accuracy"]
    assert record["tokens"] == told["search"]["accuracy"]["tokens"] == 128
    assert record["text"]["sha256"] == told["search"]["accuracy"]["sha256"]
    assert record["kl"]["mean"] == pytest.approx(kl, rel=0.02)
    options = engine.manifest.build.options
    read = read_quant_config(config)
    assert options["quant"] == engine.manifest.precision.recipe == read.quant
    assert tuple(options.get("quant_layers", ())) == read.quant_layers
    recorded = dict(rule.rsplit("=", 1) for rule in options.get("quant_layers", ()))
    for unit in told["units"]:
        if unit["recipe"] != read.quant:
            assert any(name.startswith(unit["name"].split("{")[0]) for name in recorded), unit["name"]
    stored = sum(size for name, size in engine.manifest.precision.weights.items() if "4 bit" in name or "int4" in name)
    assert stored > 0


def test_what_is_told_is_what_was_measured(found) -> None:
    config, told = found
    names = [each["name"] for each in told["measured"]]
    assert names.count("int4-wo") == names.count("int8-wo") == 1 and "autoquant" in names
    holding = [each for each in told["measured"] if each["kl"]["mean"] <= MAX_KL]
    assert told["chosen"] in holding and told["chosen"]["bytes"] == min(each["bytes"] for each in holding)
    assert told["chosen"]["bytes"] < next(each["bytes"] for each in told["measured"] if each["name"] == "int8-wo")
    search = json.loads(config.read_text())["search"]
    assert search == told["search"] and search["measured"] == told["chosen"]
    assert (search["target"], search["dtype"], search["max_kl"]) == ("cpu", "float32", MAX_KL)
    assert search["sensitivity"]["sha256"] != search["accuracy"]["sha256"]
    plot = config.with_suffix(".svg").read_text()
    for name in ("autoquant", "int4-wo", "int8-wo", "bound", "mean KL, nats", "MB of weights"):
        assert f">{name}</text>" in plot


def test_twice_gives_the_same_bytes_and_the_tables(found, outliers: Path, tmp_path: Path, invoke) -> None:
    config, _ = found
    out = tmp_path / "q.json"
    result = invoke("autoquant", outliers, "-o", out, "--max-kl", MAX_KL, "--candidates", "int4-wo,int8-wo", *FEW)
    assert result.exit_code == 0, result.stderr
    assert out.read_bytes() == config.read_bytes()
    assert out.with_suffix(".svg").read_bytes() == config.with_suffix(".svg").read_bytes()
    for text in ("Chosen", "KL of each recipe alone", "(chosen)", f"--quant-config {out}", HARD):
        assert text in result.stdout
    assert "chosen: dtype float32" in result.stderr
    again = invoke("autoquant", outliers, "-o", out, "--max-kl", MAX_KL)
    assert again.exit_code == 2 and "--force to replace a file" in again.stderr


def test_a_bound_that_no_choice_keeps_is_exit_3_and_writes_nothing(outliers: Path, tmp_path: Path, invoke) -> None:
    words = ("--max-kl", "1e-9", "--candidates", "int4-wo,int8-wo", *FEW)
    result = invoke("autoquant", outliers, "-o", tmp_path / "q.json", *words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no choice of int4-wo, int8-wo keeps the mean KL within --max-kl 1e-09: the best reaches " in result.stderr
    assert "\n  where: worst units: model.layers." in result.stderr and " alone)" in result.stderr
    assert "--candidates with more bits: none" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--candidates", "int4-wo,int5-wo"), "unknown quantization recipe 'int5-wo'"),
        (("--candidates", "int4-wo"), "the candidates are int4-wo"),
        (("--candidates", "none,none"), "the candidates are none, none"),
        (("--candidates", "stored,none"), "recipe 'stored' keeps what a checkpoint stores"),
        (("--candidates", "int4-awq,none"), "recipe 'int4-awq' scales what linears read"),
        (
            ("--candidates", "int4-gptq,none"),
            "recipe 'int4-gptq' needs calibration, and a build of the result the same",
        ),
        (("--calibration", "stats"), "none of int4-wo, int8-wo, none needs calibration"),
        (("--candidates", "fp8,none"), "the cpu target has no products of 8-bit floats"),
        (("--candidates", "fp8,none", "--target", "cuda", "--sm", "80"), "SM 80 cannot multiply 8-bit floats"),
        (("--target", "gpu"), "unknown target 'gpu'"),
        (("--dtype", "bfloat16"), "the cpu target does not compute in bfloat16"),
        (("--objective", "speed"), "unknown objective 'speed'"),
        (("--sensitivity-tokens", "1"), "sensitivity_tokens is 1"),
        (("--max-kl", "-1"), "max_kl is -1.0"),
    ],
)
def test_bad_options(outliers: Path, tmp_path: Path, invoke, words, message) -> None:
    result = invoke("autoquant", outliers, "-o", tmp_path / "q.json", "--max-kl", "0.1", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_must_be_given(outliers: Path, tmp_path: Path, invoke) -> None:
    for words, message in (
        (("--max-kl", 1), "no quant config is given"),
        (("-o", tmp_path / "q"), "no bound is given"),
    ):
        result = invoke("autoquant", outliers, *words)
        assert result.exit_code == 2 and message in result.stderr


def test_the_config_is_not_written_over_its_plot(outliers: Path, tmp_path: Path, invoke) -> None:
    result = invoke("autoquant", outliers, "-o", tmp_path / "q.svg", "--max-kl", 1)
    assert result.exit_code == 2 and "q.svg is where the plot goes" in result.stderr


def test_one_text_for_both_is_refused(outliers: Path, tmp_path: Path, invoke) -> None:
    (tmp_path / "t.txt").write_text("the cat sat on the mat")
    words = ("--sensitivity-text", tmp_path / "t.txt", "--accuracy-text", tmp_path / "t.txt")
    result = invoke("autoquant", outliers, "-o", tmp_path / "q.json", "--max-kl", 1, *words)
    assert result.exit_code == 2
    assert "t.txt is both what is tried on and what is measured on" in result.stderr


@pytest.mark.slow
def test_weights_that_gptq_rounds_are_those_of_the_build(outliers: Path, tmp_path: Path, invoke) -> None:
    """With the statistics of one file; the lm_head, which has none, is not rounded by GPTQ."""
    stats, out = tmp_path / "stats", tmp_path / "q.json"
    options = ("--candidates", "int4-gptq,int8-wo,none", "--calibration", stats, "--max-kl", 0.1, *FEW)
    result = invoke("autoquant", outliers, "-o", out, *options, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["search"]["calibration"]["sha256"]
    chosen = {unit["name"]: unit["recipe"] for unit in told["units"]}
    assert "int4-gptq" in chosen.values() and chosen["lm_head"] != "int4-gptq"
    words = ("--quant-config", out, "--calibration", stats, "--max-seq-len", 128, "--accuracy-tokens", 128)
    result = invoke("convert", outliers, "-o", tmp_path / "e", "--target", "cpu", *words, "--json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)["accuracy"]
    assert record["kl"]["mean"] == pytest.approx(told["chosen"]["kl"]["mean"], rel=0.02)
    assert record["kl"]["mean"] <= 0.1
    again = invoke("autoquant", outliers, "-o", tmp_path / "again.json", *options)
    assert again.exit_code == 0, again.stderr
    assert (tmp_path / "again.json").read_bytes() == out.read_bytes()


@pytest.mark.slow
def test_the_bytes_that_a_step_reads_can_be_the_objective(tmp_path: Path, invoke) -> None:
    model = save_tiny(tiny_model("mixtral"), tmp_path / "mixtral")
    words = ("--max-kl", 0.05, "--objective", "decode", *FEW, "--json")
    result = invoke("autoquant", model, "-o", tmp_path / "q.json", *words)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    holding = [each for each in told["measured"] if each["kl"]["mean"] <= 0.05]
    assert told["chosen"]["bytes_read"] == min(each["bytes_read"] for each in holding)
    assert ">MB read in a decode step</text>" in (tmp_path / "q.svg").read_text()
