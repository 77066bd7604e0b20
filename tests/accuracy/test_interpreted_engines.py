"""`llmbuild accuracy --device interpreter`: engines of the cuda target where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmbuild.builder.build import BuildConfig, build
from llmbuild.builder.targets.cuda import target as cuda_target
from llmbuild.engine.cubin import Cubin
from llmbuild.engine.kernel_pack import CompiledKernel
from llmbuild.errors import DeviceError
from llmbuild.plugins.kernels.spec import KernelSpec
from llmbuild.runtime.executors import registry
from support.cuda_engine import launch
from support.tiny_models import save_tiny, tiny_model

TOKENS = 24
LIMITS = {"max_batch_size": 32, "max_num_tokens": 32, "max_seq_len": 64}


def compile_nothing(specs: Sequence[KernelSpec], sms: Sequence[int], **_: Any) -> list[CompiledKernel]:
    """Stands for the compiler, whose code the interpreter does not read."""
    cubins = {sm: Cubin(launch("none", sm=sm), b"none") for sm in sms}
    return [CompiledKernel(spec.name, spec.grid, cubins) for spec in specs]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_target, "compile_all", compile_nothing)


def built(model: Path, out: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    """Return an engine and what the oracle found of it when it was built."""
    options = {"dtype": "float32", "sm": "90", **LIMITS, **options}
    report = build(BuildConfig(model=model, output=out, target="cuda", accuracy_tokens=TOKENS, **options))
    assert report.accuracy is not None
    return out, report.accuracy


def measured(invoke: Any, engine: Path, model: Path, *words: object) -> dict[str, Any]:
    words = ("--against", model, "--tokens", TOKENS, "--device", "interpreter", "--json", *words)
    result = invoke("accuracy", engine, *words)
    assert result.exit_code == 0, result.stderr
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def same_within_noise(told: dict[str, Any], oracle: dict[str, Any]) -> None:
    assert (told["text"], told["tokens"]) == (oracle["text"], oracle["tokens"])
    assert told["kl"]["mean"] == pytest.approx(oracle["kl"]["mean"], rel=0.05)
    assert told["logits_error"] == pytest.approx(oracle["logits_error"], rel=0.05)
    assert told["perplexity"]["candidate"] == pytest.approx(oracle["perplexity"]["candidate"], rel=2e-3)
    assert told["top1"] == pytest.approx(oracle["top1"], abs=1.5 / TOKENS)


MIXED = ("*.o_proj.*=int8-wo", "*.down_proj.*=int4-wo", "*.q_proj.*=int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def mixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_target, "compile_all", compile_nothing)
        out = tmp_path_factory.mktemp("engines") / "mixed"
        return built(model, out, quant="fp8", quant_layers=MIXED, kv_cache_dtype="int8")


def test_an_engine_of_many_formats_computes_what_the_oracle_said(mixed, model: Path, invoke) -> None:
    engine, oracle = mixed
    told = measured(invoke, engine, model)
    assert oracle["kl"]["mean"] > 1e-5
    same_within_noise(told, oracle)
    assert (told["target"], told["quant"], told["device"]) == ("cuda", "fp8", "interpreter, SM 90")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"quant": "fp8"},
        {"quant": "int4-wo"},
        {"quant": "int8-wo"},
        {"quant": "int8"},
        {"quant": "none", "kv_cache_dtype": "int8"},
        {"quant": "int8-sq", "calibration_tokens": 300},
        {"quant": "int4-awq", "calibration_tokens": 300},
        {"quant": "fp8-static", "calibration_tokens": 300},
        {"quant": "none", "kv_cache_dtype": "fp8", "calibration_tokens": 300},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_each_recipe_computes_what_the_oracle_said(llama: Path, tmp_path: Path, uncompiled, invoke, options) -> None:
    engine, oracle = built(llama, tmp_path / "engine", **options)
    assert oracle["kl"]["mean"] > 1e-5
    same_within_noise(measured(invoke, engine, llama), oracle)


@pytest.mark.slow
def test_a_plan_in_half_precision_is_near_the_float32_model(llama: Path, tmp_path: Path, uncompiled, invoke) -> None:
    """Against a model in float32 an engine in bfloat16 also loses what bfloat16 does, which is less than fp8 does."""
    engine, oracle = built(llama, tmp_path / "engine", quant="fp8", dtype="bfloat16")
    told = measured(invoke, engine, llama)
    assert told["kl"]["mean"] == pytest.approx(oracle["kl"]["mean"], rel=0.5)
    assert told["logits_error"] == pytest.approx(oracle["logits_error"], rel=0.25)


@pytest.mark.slow
def test_thresholds_and_the_table(mixed, model: Path, invoke) -> None:
    engine, _ = mixed
    result = invoke("accuracy", engine, "--against", model, "--tokens", 4, "--device", "interpreter", "--max-kl", 0)
    assert result.exit_code == 3
    assert "error of the logits" in result.stdout and "(interpreter, SM 90) against" in result.stdout
    assert "error: too far from the unquantized model: mean KL " in result.stderr


def test_without_a_gpu_it_says_what_to_do(mixed, model: Path, invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(*_: Any, **__: Any) -> None:
        raise DeviceError("no NVIDIA driver is installed", hint="the cuda target runs on NVIDIA GPUs")

    monkeypatch.setattr(registry, "load_executor", no_gpu)
    result = invoke("accuracy", mixed[0], "--against", model)
    assert result.exit_code == 2
    assert "error: no NVIDIA driver is installed" in result.stderr
    assert "without one, --device interpreter runs the plan of a tiny model on the CPU" in result.stderr


@pytest.mark.slow
def test_another_model_is_refused(mixed, tmp_path: Path, invoke) -> None:
    other = save_tiny(tiny_model("llama", num_hidden_layers=1, intermediate_size=64), tmp_path / "other")
    result = invoke("accuracy", mixed[0], "--against", other, "--device", "interpreter")
    assert result.exit_code == 2
    assert "this version of llmbuild plans other otherwise than the engine was" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "gpu"), "device is 'gpu'"),
        (("--device", "-1"), "device is '-1'"),
        (("--device", "interpreter", "--threads", "2"), "the interpreter has no threads to choose"),
    ],
)
def test_bad_options(mixed, model: Path, invoke, words, message) -> None:
    result = invoke("accuracy", mixed[0], "--against", model, *words)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
def test_engines_of_other_targets_are_refused(model: Path, tmp_path: Path, invoke) -> None:
    build(BuildConfig(model=model, output=tmp_path / "cpu", target="cpu", max_seq_len=64))
    result = invoke("accuracy", tmp_path / "cpu", "--against", model, "--device", "interpreter")
    assert result.exit_code == 2
    assert "the interpreter runs engines of the cuda target; this one is of the cpu target" in result.stderr
