"""An engine of the cuda target, built and shown without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmbuild import BuildConfig, build
from llmbuild.engine.kernel_pack import KernelPack
from llmbuild.engine.launch_plan import LaunchPlan, launches_of
from llmbuild.engine.reader import open_engine
from support.tiny_models import save_tiny, tiny_model


def build_tiny(directory: Path, name: str) -> Path:
    config = BuildConfig(
        model=directory / "model", output=directory / name, target="cuda", sm="80,90", max_batch_size=4, max_seq_len=64
    )
    return build(config).output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cuda")
    save_tiny(tiny_model("llama"), directory / "model")
    return directory


@pytest.fixture(scope="module")
def cuda_engine(model: Path) -> Path:
    return build_tiny(model, "engine")


def test_two_builds_have_the_same_bytes(model: Path, cuda_engine: Path) -> None:
    again = build_tiny(model, "again")
    files = {path.relative_to(cuda_engine) for path in cuda_engine.rglob("*") if path.is_file()}
    assert files == {path.relative_to(again) for path in again.rglob("*") if path.is_file()}
    for file in files:
        assert (cuda_engine / file).read_bytes() == (again / file).read_bytes(), file


def test_nothing_in_an_engine_names_a_path_of_this_machine(model: Path, cuda_engine: Path) -> None:
    home = str(Path(__file__).parents[2]).encode()
    for path in cuda_engine.rglob("*"):
        if path.is_file():
            assert home not in path.read_bytes() and str(model).encode() not in path.read_bytes()


@pytest.mark.parametrize("sm", ["80", "90"])
def test_every_kernel_of_the_plan_is_in_the_pack(cuda_engine: Path, sm: str) -> None:
    engine = open_engine(cuda_engine, requirements=False)
    section = engine.manifest.target.section
    plan = LaunchPlan.read(engine.file(section["plans"][sm]))
    pack = KernelPack.open(engine.file(section["kernels"][sm]))
    assert plan.sampling is not None
    named = {launch.kernel for op in (*plan.ops, *plan.sampling.ops()) for launch in launches_of(op)}
    assert named == set(pack.names)
    for op in (*plan.ops, *plan.sampling.ops()):
        for launch in launches_of(op):
            taken = [each for each in pack.kernel(launch.kernel, int(sm)).launch.parameters if each.kind != "scratch"]
            assert len(taken) == len(launch.arguments)


def test_inspect_shows_the_plan(invoke, cuda_engine: Path) -> None:
    result = invoke("inspect", cuda_engine, "--plan", "--sm", "90")
    assert result.exit_code == 0, result.stderr
    for text in ("Launch plan, SM 90", "GEMM [T, 64] x [64, 128] bfloat16", "attention_decode", "more: GEMM library"):
        assert text in result.stdout
    told = json.loads(invoke("inspect", cuda_engine, "--plan", "--json").stdout)
    assert told["sm"] == 80 and told["plan"]["version"] == 2
    shown = invoke("inspect", cuda_engine).stdout
    assert "bfloat16, 256 bytes a token" in shown


def test_inspect_names_plans_that_are_not_there(invoke, cuda_engine: Path, engine: Path) -> None:
    result = invoke("inspect", cuda_engine, "--plan", "--sm", "86")
    assert result.exit_code == 2
    assert "error: the engine has no plan for SM 86" in result.stderr and "it has 80, 90" in result.stderr
    result = invoke("inspect", engine, "--plan")
    assert result.exit_code == 2
    assert "an engine of the cpu target has no launch plan" in result.stderr
    result = invoke("inspect", engine, "--sm", "90")
    assert result.exit_code == 2 and "--sm chooses a plan to show" in result.stderr


def test_verify_checks_the_plan_too(invoke, cuda_engine: Path) -> None:
    assert invoke("verify", cuda_engine).exit_code == 0
