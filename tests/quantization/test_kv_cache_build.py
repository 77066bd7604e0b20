"""--kv-cache-dtype: what a build takes, calibrates, reads from checkpoints, writes down and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmbuild.builder.build import build
from llmbuild.builder.calibration import Calibration
from llmbuild.builder.dry_run import dry_run
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.ir import Program
from llmbuild.builder.options import BuildConfig, choose, resolve_cache
from llmbuild.builder.pipeline import optimize
from llmbuild.builder.targets.cpu.target import CpuTarget
from llmbuild.builder.targets.cuda.target import CudaTarget
from llmbuild.engine.reader import open_engine
from llmbuild.errors import ConfigError, ModelError, UnsupportedError
from llmbuild.quantization.cache_scales import fp8_scale
from llmbuild.quantization.calibration.file import StatisticsFile
from llmbuild.quantization.recipes import KvCache, find_recipe
from support.cpu_engines import needs_compiler
from support.staggered import serve
from support.tiny_models import save_tiny, tiny_model
from support.tiny_quantized import STORED, edit_tensors, save_quantized
from support.traced import optimized, traced

TEXT = "Forty winks, and then the rain came down on the roof of the old mill. " * 8
ATTENTION = "model.layers.{}.self_attn.{}"
HEADS, WIDTH, LAYERS = 2, 16, 2  # of the tiny llama's cache


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> BuildConfig:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "text.txt").write_text(TEXT)
    return BuildConfig(
        model=save_tiny(tiny_model("llama"), folder / "model"),
        output=folder / "engine",
        target="cuda",
        sm="90",
        kv_cache_dtype="fp8",
        calibration_text=folder / "text.txt",
        calibration_tokens=300,
        max_seq_len=64,
    )


def calibrated(config: BuildConfig) -> tuple[Program, Calibration]:
    program = load_program(config.model, dtype=torch.float32)
    calibration = Calibration(config)
    optimize(program, choose(config).recipe, calibrate=calibration)
    return program, calibration


@pytest.mark.parametrize("quant", ["none", "int4-awq"])
def test_scales_are_those_of_the_statistics_which_are_gathered_once(
    quant: str, config: BuildConfig, tmp_path: Path
) -> None:
    config = replace(config, quant=quant, calibration=tmp_path / "statistics")
    program, calibration = calibrated(config)
    assert calibration.file is not None and calibration.section() is not None
    file = StatisticsFile(tmp_path / "statistics")
    for layer in range(LAYERS):
        for part in ("keys", "values"):
            absmax = float(file.absmax(f"layers.{layer}.{part}").max())
            scale = program.weights[f"{part}_scale_{layer}"].load()
            assert scale.tolist() == [pytest.approx(fp8_scale(absmax))] and float(scale) != 1.0
    assert next(rewrite.count for rewrite in program.rewrites if rewrite.name == "quantize_cache") == LAYERS


def test_keys_are_observed_after_they_are_rotated(config: BuildConfig, tmp_path: Path) -> None:
    """Rotation keeps the length of a pair of channels and changes the channels."""
    _, calibration = calibrated(replace(config, calibration=tmp_path / "statistics"))
    assert calibration.file is not None
    program = optimized("llama")
    keys = next(node for node in program.graph.nodes if "paged_attention" in str(node.target)).args[1]
    assert "rope" in str(keys.target)
    assert calibration.file.description.inputs["layers.0.keys"].columns == WIDTH


def test_no_scales_without_calibration(config: BuildConfig) -> None:
    program = traced("llama")
    with pytest.raises(ConfigError, match="the scales of an fp8 KV cache need calibration"):
        optimize(program, replace(find_recipe("none"), kv_cache=KvCache("fp8")))


def test_values_that_are_not_finite_stop_the_calibration(config: BuildConfig, tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3] = float("nan")
    path = save_tiny(model, tmp_path / "model")
    with pytest.raises(ModelError, match=r"'layers\.1\.values' holds NaN during calibration"):
        calibrated(replace(config, model=path))


def test_statistics_that_know_no_cache_are_refused(config: BuildConfig, tmp_path: Path) -> None:
    """As an older version made them: of linears alone."""
    from llmbuild.builder.passes.linear_inputs import linear_inputs
    from support.calibrated import before_formats

    program = before_formats(traced("llama"))
    Calibration(replace(config, calibration=tmp_path / "old"))(program, linear_inputs(program), frozenset())
    config = replace(config, calibration=tmp_path / "old", calibration_text=None, calibration_tokens=None)
    with pytest.raises(ConfigError, match=r"layers\.0\.keys.* 3 more"):
        calibrated(config)


@pytest.mark.parametrize(("dtype", "expected"), [("fp8", 2 * WIDTH), ("int8", 2 * WIDTH + 8), ("auto", 4 * WIDTH)])
@pytest.mark.parametrize("quant", ["none", "int8-wo"])
def test_a_dry_run_knows_the_bytes(dtype: str, expected: int, quant: str, config: BuildConfig) -> None:
    config = replace(config, quant=quant, kv_cache_dtype=dtype, calibration_text=None, calibration_tokens=None)
    found = dry_run(config)
    assert found.kv_bytes == LAYERS * HEADS * expected and not found.unsupported


def test_int8_needs_no_calibration(config: BuildConfig) -> None:
    with pytest.raises(ConfigError, match="needs no calibration"):
        choose(replace(config, kv_cache_dtype="int8"))


def test_unknown_names_are_refused(config: BuildConfig) -> None:
    with pytest.raises(ConfigError, match="unknown KV cache dtype 'fp9'") as error:
        choose(replace(config, kv_cache_dtype="fp9"))
    assert "fp8" in str(error.value.hint)


@needs_compiler
def test_an_int8_engine_says_so_serves_and_is_measured(config: BuildConfig, tmp_path: Path) -> None:
    config = replace(
        config, target="cpu", sm=None, kv_cache_dtype="int8", calibration_text=None, calibration_tokens=None
    )
    text = config.model.parent / "text.txt"
    measured = replace(config, output=tmp_path / "engine", accuracy_text=text, accuracy_tokens=200, max_kl=0.01)
    report = build(measured)
    assert report.accuracy is not None and 0 < report.accuracy["kl"]["mean"] < 0.01
    manifest = open_engine(tmp_path / "engine").manifest
    assert manifest.kv_cache.dtype == "int8" and manifest.build.options["kv_cache_dtype"] == "int8"
    assert manifest.kv_cache.token_bytes == LAYERS * HEADS * (2 * WIDTH + 8)
    assert len(serve(tmp_path / "engine", [[3, 4, 5], [7]], 4, kv_cache_blocks=16).tokens) == 2


# ------------------------------------------------------------------------------------- checkpoints that have scales
def checkpoint(directory: Path, *, layers: int = LAYERS, scale: float = 0.25, scheme: str | None = "FP8") -> Path:
    """A checkpoint of ModelOpt with scales for the caches of some layers."""
    stored = STORED["modelopt-fp8"]
    assert stored.modelopt is not None
    described = replace(stored, modelopt={**stored.modelopt, "kv_cache_quant_algo": scheme})
    path, _ = save_quantized(tiny_model("llama"), directory, described)
    names = [ATTENTION.format(n, name) for n in range(layers) for name in ("k_proj.k_scale", "v_proj.v_scale")]
    scales = {name: torch.tensor(scale * (1 + place)) for place, name in enumerate(names)}
    edit_tensors(path, lambda tensors: tensors.update(scales))
    return path


def test_scales_of_a_checkpoint_are_used_without_being_asked_for(tmp_path: Path) -> None:
    config = BuildConfig(model=checkpoint(tmp_path), output=tmp_path / "engine", target="cuda", sm="90")
    choices = choose(config)
    assert choices.recipe.kv_cache == KvCache("fp8", stored=True)
    assert "kv_cache_dtype fp8: with the scales of the checkpoint" in choices.notes
    program, calibration = calibrated(config)
    found = [float(program.weights[f"{part}_scale_{n}"].load()) for n in range(LAYERS) for part in ("keys", "values")]
    assert found == [0.25, 0.5, 0.75, 1.0] and calibration.file is None
    assert not any("KV cache" in line for line in program.rewrites[0].declined)


def test_a_target_without_fp8_says_that_it_takes_another_dtype(tmp_path: Path) -> None:
    config = BuildConfig(model=checkpoint(tmp_path), output=tmp_path / "engine")
    notes: list[str] = []
    assert resolve_cache(config, choose(config), CpuTarget(), "float32", notes).recipe.kv_cache is None
    assert notes == ["the cpu target has no fp8 KV cache: the computation dtype is taken"]
    assert resolve_cache(config, choose(config), CudaTarget(), "bfloat16", notes).recipe.kv_cache == KvCache(
        "fp8", stored=True
    )


def test_the_computation_dtype_by_name_leaves_the_scales_of_a_checkpoint_alone(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    config = BuildConfig(model=path, output=tmp_path / "engine", target="cuda", kv_cache_dtype="bfloat16")
    choices = choose(config)
    assert choices.recipe.kv_cache is None
    assert resolve_cache(config, choices, CudaTarget(), "bfloat16", []) is choices
    with pytest.raises(UnsupportedError, match="the KV cache cannot be in bfloat16 where float16 is computed in"):
        resolve_cache(config, choices, CudaTarget(), "float16", [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 1}, "has no scales of keys and values of all 2 layers"),
        ({"scale": 0.0}, "k_scale' holds 0.0, which is no scale of a KV cache"),
    ],
)
def test_scales_that_cannot_be_used_stop_the_build(options: dict, message: str, tmp_path: Path) -> None:
    config = BuildConfig(model=checkpoint(tmp_path, **options), output=tmp_path / "engine", target="cuda", sm="90")
    with pytest.raises(ModelError, match=message):
        program, _ = calibrated(config)
        program.weights["keys_scale_0"].load()


def test_schemes_that_are_not_known_are_named(tmp_path: Path) -> None:
    config = BuildConfig(model=checkpoint(tmp_path, scheme="NVFP4"), output=tmp_path / "engine", target="cuda")
    choices = choose(config)
    assert choices.recipe.kv_cache is None
    assert "kv_cache_dtype auto: what is computed in; NVFP4 of the checkpoint is not known" in choices.notes
