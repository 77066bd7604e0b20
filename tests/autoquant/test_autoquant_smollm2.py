"""The real model: fewer units in 16 bits than by layers, and a bound that an independent measurement confirms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.smollm2 import dequantize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MAX_KL = 0.015


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "smollm2"
    dequantize(smollm2_gguf, out)
    return out


def test_a_bound_between_that_of_fp8_and_of_bfloat16_is_kept(smollm2: Path, tmp_path: Path, invoke) -> None:
    """fp8 alone has a KL of about 0.03."""
    out = tmp_path / "q.json"
    words = ("--max-kl", MAX_KL, "--target", "cuda", "--candidates", "fp8,none")
    few = ("--sensitivity-tokens", 128, "--accuracy-tokens", 512)
    result = invoke("autoquant", smollm2, "-o", out, *words, *few, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    by_name = {each["name"]: each for each in told["measured"] if each["name"] != "autoquant"}
    assert by_name["fp8"]["kl"]["mean"] > MAX_KL >= told["chosen"]["kl"]["mean"]
    assert by_name["fp8"]["bytes"] < told["chosen"]["bytes"] < 0.8 * by_name["none"]["bytes"]
    assert len(told["units"]) == 4 * 30 + 1
    chosen = {unit["name"]: unit["recipe"] for unit in told["units"]}
    assert chosen["model.layers.29.mlp.down_proj"] == "none"  # what costs most: docs/accuracy.md
    assert list(chosen.values()).count("fp8") > 60
    # The same program in float32, by way of the cuda target's own build.
    limits = ("--max-seq-len", 512, "--sm", 90, "--dtype", "float32")
    accuracy = ("--accuracy-tokens", 512, "--max-kl", MAX_KL)
    words = ("--target", "cuda", "--quant-config", out, *limits, *accuracy)
    result = invoke("convert", smollm2, "-o", tmp_path / "e", *words, "--json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)["accuracy"]
    assert record["kl"]["mean"] == pytest.approx(told["chosen"]["kl"]["mean"], rel=0.02)
