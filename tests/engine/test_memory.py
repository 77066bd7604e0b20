"""`--max-memory`: a size in words, an estimate before weights are read, and a refusal that says what is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from llmbuild.builder import memory
from llmbuild.builder.build import BuildConfig, build
from llmbuild.builder.frontend.safetensors_file import StoredTensor
from llmbuild.builder.ir import Cast, Map
from llmbuild.builder.memory import MemoryEstimate, check, needed
from llmbuild.errors import ConfigError
from llmbuild.quantization.expressions import Quantized
from llmbuild.quantization.recipes import PerGroup, WeightOnly
from llmbuild.units import parse_size
from support.tiny_models import save_tiny, tiny_config, tiny_model


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("4G", 4 << 30),
        ("4g", 4 << 30),
        ("4GB", 4 * 10**9),
        ("1.5 GB", 15 * 10**8),
        ("500M", 500 << 20),
        ("64kib", 64 << 10),
        ("1T", 1 << 40),
        ("300000000", 300_000_000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4X", "GB", "-1G", "0", "4 G B", "1,5G", "4iB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
    with pytest.raises(ConfigError) as caught:
        BuildConfig(model="m", output="o", max_memory=text)
    assert str(caught.value) == (
        f"max_memory: {text!r} is not a size\n  where: --max-memory\n  next:  give 4GiB, 4G (the same), 4GB or 500M"
    )


def test_limit_in_bytes_or_in_words():
    assert BuildConfig(model="m", output="o").memory_limit is None
    assert BuildConfig(model="m", output="o", max_memory=10**9).memory_limit == 10**9
    assert BuildConfig(model="m", output="o", max_memory="1GiB").memory_limit == 1 << 30


def test_refusal_says_what_is_needed_and_what_dominates():
    found = MemoryEstimate(700_000_000, 1_200_000_000, 300_000_000, "lm_head.weight")
    check(found, None)
    check(found, 2_200_000_000)
    with pytest.raises(ConfigError) as caught:
        check(found, 2 << 30)
    assert str(caught.value) == (
        "converting needs about 2.2 GB of memory, but only 2.1 GB are allowed\n"
        "  where: --max-memory: 700.0 MB for Python, its packages and the traced graph, 1.2 GB for the hungriest "
        "weight, lm_head.weight, 300.0 MB for packing and writing\n"
        "  next:  allow 2200MB or more; weights are read and written in pieces already, so that another --quant "
        "changes little"
    )


def test_a_large_weight_needs_little_unless_it_is_made_as_a_whole(tmp_path):
    large = Cast(StoredTensor("w", tmp_path / "none", 0, 2 << 30, (1 << 18, 1 << 12), torch.bfloat16), torch.float32)
    assert needed(large) < 150_000_000
    assert needed(Quantized(large, WeightOnly(8, PerGroup(32)))) < 300_000_000
    whole = Map(large, torch.t, (1 << 12, 1 << 18), torch.float32, "wᵀ")
    assert needed(whole) > 10 << 30


@pytest.mark.parametrize("words", [["--output", "e"], ["--dry-run"]])
def test_the_command_refuses_before_a_weight_is_read(tmp_path, monkeypatch, words):
    from llmbuild.cli.main import app

    save_tiny(tiny_model("llama"), tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StoredTensor, "load", None)  # calling it is an error of another kind
    done = CliRunner().invoke(app, ["convert", "m", "--max-memory", "100M", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "error: converting needs about " in done.stderr and "only 104.9 MB are allowed" in done.stderr
    assert "where: --max-memory: " in done.stderr and "next:  allow " in done.stderr
    assert os.listdir(tmp_path) == ["m"]


def test_the_estimate_holds_and_is_told(tmp_path):
    """In a process of its own, whose peak is that of this conversion."""
    model = save_tiny(tiny_model("llama"), tmp_path / "m")
    command = [sys.executable, "-m", "llmbuild", "convert", str(model), "-o", str(tmp_path / "e"), "--json"]
    done = subprocess.run([*command, "--max-memory", "8GiB"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["memory"]
    assert told["peak"] <= told["estimate"]["total"] <= 1.5 * told["peak"]
    assert "max_memory" not in (tmp_path / "e" / "engine.json").read_text()


def test_a_dry_run_shows_the_estimate(tmp_path, monkeypatch):
    from llmbuild.builder.dry_run import dry_run

    monkeypatch.setattr(memory, "peak_rss", lambda: 500_000_000)
    tiny_config("llama").save_pretrained(tmp_path)
    found = dry_run(BuildConfig(model=tmp_path, output=tmp_path / "e")).to_dict()["memory"]
    assert found["total"] == found["program"] + found["weight"] + found["workspace"]
    assert found["program"] == 500_000_000 and found["largest_weight"] == "model.embed_tokens.weight"


def test_in_python_the_build_stops_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "peak_rss", lambda: 5 << 30)
    model = save_tiny(tiny_model("llama"), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"needs about 5\.4 GB of memory, but only 4\.3 GB are allowed"):
        build(BuildConfig(model=model, output=tmp_path / "e", max_memory="4GiB"))
    assert os.listdir(tmp_path) == ["m"]
