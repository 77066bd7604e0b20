"""Engines of calibrated recipes from a tiny model: statistics made, kept, used again, recorded; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmbuild.builder.build import build
from llmbuild.builder.dry_run import dry_run
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.options import BuildConfig
from llmbuild.builder.pipeline import optimize
from llmbuild.engine.hashing import sha256_file
from llmbuild.errors import ConfigError
from llmbuild.quantization.calibration.file import StatisticsFile, merge
from llmbuild.quantization.recipes import find_recipe
from support.calibrated import gathered
from support.cpu_engines import compiled, needs_compiler, open_session, oracle_logits, session_logits
from support.staggered import serve
from support.tiny_models import save_tiny, tiny_model

TEXT = "Forty winks, and then the rain came down on the roof of the old mill. " * 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> BuildConfig:
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "text.txt").write_text(TEXT)
    return BuildConfig(
        model=save_tiny(tiny_model("llama"), folder / "model"),
        output=folder / "engine",
        target="cpu",
        quant="int4-gptq",
        calibration_text=folder / "text.txt",
        calibration_tokens=300,
        max_seq_len=64,
    )


@needs_compiler
@pytest.mark.parametrize("recipe", ["int4-gptq", "int4-awq"])
def test_a_kept_file_gives_the_same_engine_again(recipe: str, config: BuildConfig, tmp_path: Path) -> None:
    config = replace(config, quant=recipe)
    statistics = tmp_path / "statistics"
    told: list[tuple[str, int, int, str]] = []
    made = build(
        replace(config, output=tmp_path / "made", calibration=statistics),
        progress=lambda *event: told.append(event),
    )
    used = build(
        replace(
            config, output=tmp_path / "used", calibration=statistics, calibration_text=None, calibration_tokens=None
        )
    )
    recorded = made.manifest.build.options["calibration"]
    assert recorded["sha256"] == sha256_file(statistics)
    assert recorded["texts"][0]["source"] == "text.txt" and recorded["texts"][0]["tokens"] == 300
    assert made.manifest.to_json() == used.manifest.to_json()
    steps = [event[1:3] for event in told if event[0] == "calibrate"]
    assert steps and steps[-1][0] == steps[-1][1]
    assert sum(rewrite.name == "choose_formats" for rewrite in made.rewrites) == 1
    label = "int4 per group 128, GPTQ" if recipe == "int4-gptq" else "int4 per group 128"
    assert label in made.manifest.precision.weights
    assert [len(tokens) for tokens in serve(tmp_path / "used", [[5, 6, 7]], 4).tokens] == [4]


@needs_compiler
@pytest.mark.parametrize("recipe", ["int4-gptq", "int4-awq"])
def test_the_engine_computes_what_the_oracle_does(recipe: str, config: BuildConfig, tmp_path: Path) -> None:
    program = load_program(config.model, dtype=torch.float32)
    optimize(program, find_recipe(recipe), calibrate=gathered([list(range(5, 60)), list(range(90, 130))]))
    expected = oracle_logits(program)
    target = compiled(program, tmp_path / "engine", native=True)
    got = session_logits(open_session(tmp_path / "engine", target), target)
    largest = max(np.abs(logits).max() for logits in expected)
    assert max(np.abs(a - b).max() for a, b in zip(got, expected, strict=True)) < 1e-5 * largest


@needs_compiler
def test_statistics_that_nobody_keeps_are_removed_and_give_the_same_weights(
    config: BuildConfig, tmp_path: Path
) -> None:
    kept = build(replace(config, output=tmp_path / "kept", calibration=tmp_path / "statistics"))
    lost = build(replace(config, output=tmp_path / "lost"))
    assert kept.manifest.to_json() == lost.manifest.to_json()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "lost", "statistics"]


def test_a_dry_run_needs_no_statistics(config: BuildConfig) -> None:
    found = dry_run(config)
    assert found.unsupported == []
    chosen = next(each for each in found.passes if each["name"] == "choose_formats")
    assert chosen["count"] == 15  # 7 linears in each of two layers, and lm_head


@needs_compiler
def test_merged_statistics_can_be_used(config: BuildConfig, tmp_path: Path) -> None:
    paths = []
    for name, text in (("one", TEXT), ("two", TEXT.upper())):
        (tmp_path / f"{name}.txt").write_text(text)
        paths.append(tmp_path / name)
        build(
            replace(
                config,
                output=tmp_path / "engine",
                force=True,
                calibration=paths[-1],
                calibration_text=tmp_path / f"{name}.txt",
            )
        )
    merge(paths, tmp_path / "both")
    with_both = replace(config, output=tmp_path / "both_engine", calibration=tmp_path / "both")
    report = build(replace(with_both, calibration_text=None, calibration_tokens=None))
    recorded = report.manifest.build.options["calibration"]
    assert [text["source"] for text in recorded["texts"]] == ["one.txt", "two.txt"]
    assert recorded["sha256"] == StatisticsFile(tmp_path / "both").sha256


@needs_compiler
def test_statistics_of_another_model_or_of_fewer_layers_are_refused(config: BuildConfig, tmp_path: Path) -> None:
    path = tmp_path / "statistics"
    build(replace(config, output=tmp_path / "engine", calibration=path, exclude=("*.1.mlp.down_proj.*",)))
    again = replace(config, output=tmp_path / "e", calibration=path, calibration_text=None, calibration_tokens=None)
    with pytest.raises(ConfigError, match=r"no Gram matrix of the input of model.layers.1.mlp.down_proj.weight"):
        build(again)
    other = save_tiny(tiny_model("llama", seed=1), tmp_path / "other")
    with pytest.raises(ConfigError, match="the statistics are of another model, model, or of other files"):
        build(replace(again, model=other))
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(quant="int4-wo"), "recipe 'int4-wo' needs no calibration(.|\n)*--calibration-text"),
        (dict(calibration=Path(__file__)), "exists, so that no text is run(.|\n)*--calibration-text"),
        (dict(calibration_text=Path("/nowhere.txt")), "there is no file /nowhere.txt(.|\n)*--calibration-text"),
        (
            dict(calibration=Path(__file__), calibration_text=None, calibration_tokens=None),
            "not a file of calibration statistics",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(config: BuildConfig, changes: dict, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        build(replace(config, output=tmp_path / "engine", **changes))
    assert list(tmp_path.iterdir()) == []
