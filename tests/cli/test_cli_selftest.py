"""`llmbuild selftest`: what it finds here, and how it says that something failed or was not run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from llmbuild.builder.targets.registry import TARGETS
from llmbuild.cli import selftest as command
from llmbuild.errors import EngineError
from llmbuild.selftest import environment, steps
from llmbuild.selftest.environment import Gpu
from llmbuild.selftest.record import NotHere, TargetRecord
from llmbuild.selftest.tiny_model import write_model

RTX = "tensorrt-rtx"
EXECUTED = ["load", "prefill", "mixed", "decode", "decode again", "serve"]
H200 = Gpu("NVIDIA H200", 90, "13.0", (1, 2))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_gpu", lambda: "no NVIDIA driver is installed")


def states(record: dict) -> dict[str, str]:
    return {step["name"]: step["state"] for step in record["steps"]}


def test_cpu_takes_every_step(invoke, no_gpu, tmp_path: Path) -> None:
    result = invoke("selftest", "--target", "cpu", "--output", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert states(report["targets"][0]) == {"build": "passed"} | dict.fromkeys(EXECUTED, "passed")
    assert (report["passed"], report["failed"], report["not_run"]) == (7, 0, 0)
    assert "GPU: none: no NVIDIA driver is installed" in result.stdout
    assert "largest error" in result.stdout and "5 requests, 40 tokens" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("7 passed, 0 failed, 0 not run: ")


@pytest.mark.slow  # what it builds and compares is tested elsewhere by default
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")
def test_rtx_builds_and_says_what_it_cannot_run(invoke, no_gpu) -> None:
    result = invoke("selftest", "--target", RTX, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert states(report["targets"][0]) == {"graph": "passed", "build": "passed"} | dict.fromkeys(EXECUTED, "not run")
    details = {step["name"]: step["detail"] for step in report["targets"][0]["steps"]}
    assert details["load"] == "no GPU: no NVIDIA driver is installed"
    assert details["decode"] == "load: not run"
    assert details["build"].startswith("float16 for SM 89, ")
    assert report["machine"]["packages"]["tensorrt-rtx"].startswith("1.7.")


def test_wrong_logits_fail(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    record = TargetRecord("cpu")
    expected = np.array([[1.0, -4.0]])
    record.take("near", lambda: (steps.difference(expected + 0.01, expected, 0.02), None))
    record.take("far", lambda: (steps.difference(expected + 0.1, expected, 0.02), None))
    record.take("none", lambda: (steps.difference(expected * np.nan, expected, 0.02), None))
    assert [step.state for step in record.steps] == ["passed", "failed", "failed"]
    assert record.steps[1].detail == "largest error 0.1 of logits up to 4, 1 rows; 0.08 is allowed"

    machine = environment.environment("none")
    report = {"machine": machine, "targets": [record.to_dict()], "passed": 1, "failed": 2, "not_run": 0, "seconds": 1}
    monkeypatch.setattr(command, "run", lambda targets: report)
    result = invoke("selftest", "--target", "cpu")
    assert result.exit_code == 1
    assert "  failed   far             0.00 s  largest error 0.1" in result.stdout


def test_an_unknown_target(invoke) -> None:
    result = invoke("selftest", "--target", "gpu")
    assert result.exit_code == 2
    assert "unknown target 'gpu'" in result.stderr
    result = invoke("selftest", "--output", "/nowhere/report.json")
    assert result.exit_code == 2 and "there is no folder /nowhere" in result.stderr


def test_a_gpu_that_a_target_does_not_run_on() -> None:
    assert steps.no_use("cpu", H200) is None and steps.no_use("cuda", H200) is None
    assert steps.no_use(RTX, H200) == "tensorrt-rtx does not build for SM 90 (NVIDIA H200)"
    assert steps.no_use("cuda", H200._replace(sm=75)) == "no kernels for SM 75 (NVIDIA H200)"
    assert all(steps.no_use(target, "none") == "no GPU: none" for target in TARGETS if target != "cpu")


def test_whatever_a_step_raises_is_recorded() -> None:
    record = TargetRecord("cuda")

    def refuse(error: Exception) -> tuple[str, None]:
        raise error

    assert record.take("one", lambda: ("fine", 3)) == 3
    record.take("two", lambda: refuse(EngineError("too large", hint="buy more")))
    record.take("three", lambda: refuse(ZeroDivisionError("in a library")))
    record.take("four", lambda: refuse(NotHere("no GPU")))
    record.take("five", lambda: ("never", None), needs=("one", "three"))
    assert [step.state for step in record.steps] == ["passed", "failed", "failed", "not run", "not run"]
    assert record.steps[1].detail == "too large\n  next:  buy more"
    assert record.steps[2].detail.endswith("ZeroDivisionError: in a library")
    assert [step.detail for step in record.steps[3:]] == ["no GPU", "three: failed"]


def test_the_model_is_the_same_everywhere(tmp_path: Path) -> None:
    first, second = (write_model(tmp_path / name) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
