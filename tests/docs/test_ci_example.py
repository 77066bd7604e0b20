"""The workflow in examples/ci: its commands build an engine of a tiny model, and fail where it is not accurate."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.tiny_models import save_tiny, tiny_model

FOLDER = Path(__file__).parents[2] / "examples" / "ci"
WORKFLOW = yaml.safe_load((FOLDER / "rtx-engines.yml").read_text(encoding="utf-8"))
JOB = WORKFLOW["jobs"]["engine"]
NOT_RUN = ("Install", "Get the model")  # they download
# A model of noise is another one when it is rounded, and knows few tokens.
TINY = {"MAX_KL": "1", "MIN_TOP1": "0.5", "ACCURACY_TOKENS": "96", "MAX_SEQ_LEN": "64", "MAX_BATCH_SIZE": "2"}


def commands() -> dict[str, str]:
    return {step["name"]: step["run"] for step in JOB["steps"] if "run" in step and step["name"] not in NOT_RUN}


def run(command: str, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    tools = Path(sys.executable).parent
    told = {**WORKFLOW["env"], "RECIPE": JOB["strategy"]["matrix"]["recipe"][0], **TINY, **changes}
    environment = {**os.environ, **told, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    # As the runner runs them.
    return subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=folder, env=environment, **CAPTURED)


CAPTURED: dict[str, Any] = {"capture_output": True, "text": True}


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")
def test_commands_build_an_engine(tmp_path: Path) -> None:
    save_tiny(tiny_model("llama"), tmp_path / "model")
    assert list(commands()) == ["Build the engine, and check its accuracy", "Look at it"]
    for command in commands().values():
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "build.json").read_text())
    assert "accuracy" in json.dumps(report)
    manifest = json.loads((tmp_path / "engine" / "engine.json").read_text())
    assert manifest["target"]["section"]["sms"] == [86, 89, 120]
    uploaded = JOB["steps"][-1]["with"]["path"].replace("${{ matrix.recipe }}", "int8-wo-channel")
    with tarfile.open(tmp_path / uploaded) as archive:
        names = set(archive.getnames())
    assert {"engine/plan/tensorrt_rtx.engine", "engine/engine.json", "build.json", "layers.txt"} <= names


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")
def test_an_inaccurate_model_fails_the_job(tmp_path: Path) -> None:
    save_tiny(tiny_model("llama"), tmp_path / "model")
    build = next(iter(commands().values()))
    done = run(build, tmp_path, MAX_KL="0")
    assert done.returncode == 3, done.stderr
    assert not (tmp_path / "engine").exists()


def test_what_the_workflow_names_exists() -> None:
    from llmbuild.builder.targets.tensorrt.capabilities import RTX
    from llmbuild.quantization.recipes import find_recipe

    assert RTX.parse_sms(WORKFLOW["env"]["SMS"]) == RTX.default_sms
    for recipe in JOB["strategy"]["matrix"]["recipe"]:
        assert not find_recipe(recipe).calibrated
    assert all(name in WORKFLOW["env"] for name in TINY)
    assert "test_ci_example.py" in (FOLDER / "README.md").read_text()
