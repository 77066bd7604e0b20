"""Engines of tensorrt-rtx, built for real on this machine: what is in them, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmbuild.builder.options import BuildConfig, choose
from llmbuild.builder.targets.base import CompileOptions
from llmbuild.builder.targets.tensorrt import rtx, running
from llmbuild.builder.targets.tensorrt.builder_options import BuilderOptions, parse
from llmbuild.builder.targets.tensorrt.capabilities import RTX
from llmbuild.builder.targets.tensorrt.layers import layers
from llmbuild.builder.targets.tensorrt.profiles import profiles
from llmbuild.cli.layers import print_layers_of
from llmbuild.errors import ConfigError, LLMBuildError, UnsupportedError
from support.tensorrt_graphs import LIMITS
from support.traced import optimized

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

BF16, F16 = torch.bfloat16, torch.float16
FAMILIES = [
    ("mistral", BF16),
    ("qwen3", F16),
    ("phi", BF16),
    ("gemma2", BF16),
    ("gpt2", F16),
    ("gptj", F16),
    ("bloom", F16),
    ("cohere", BF16),
    ("minicpm3", BF16),
    ("mixtral", BF16),
    ("gpt_oss", BF16),
]


def build(program, directory: Path, sm: str = "89", *options: str):
    """Compile a traced program; its dtype is that of its logits' weights."""
    dtype = str(next(w.dtype for w in program.weights.values() if w.dtype in (BF16, F16))).removeprefix("torch.")
    return rtx.RtxTarget().compile(program, CompileOptions(LIMITS, dtype, None, sm, options), directory)


def read_layers(directory: Path) -> dict:
    return json.loads((directory / rtx.LAYERS).read_text())


@pytest.mark.parametrize(("family", "dtype"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_families_build(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    program = optimized(family, dtype=dtype)
    build(program, tmp_path / "engine")
    listing = read_layers(tmp_path / "engine")
    reached = {node for layer in listing["layers"] for node in layer["nodes"]}
    attention = {node.name for node in program.graph.nodes if "paged_attention" in str(node.target)}
    linears = {node.name for node in program.graph.nodes if str(node.target) == "aten.linear.default"}
    assert {layer["profile"] for layer in listing["layers"]} == {0, 1}
    assert attention and attention <= reached
    assert linears <= reached


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    """(program, directory, what compile returned) for the three usual GPUs."""
    folder = tmp_path_factory.mktemp("llama")
    program = optimized("llama", dtype=BF16)
    return program, folder / "engine", build(program, folder / "engine", "86,89,120")


def test_engine_is_complete_and_portable(llama) -> None:
    _, directory, compiled = llama
    assert sorted(path.name for path in directory.rglob("*") if path.is_file()) == [
        "layers.json",
        "model.onnx",
        "tensorrt_rtx.engine",
    ]
    assert compiled.section["sms"] == [86, 89, 120]
    assert compiled.block_size == LIMITS.max_seq_len
    assert compiled.requires["tensorrt-rtx"].startswith("==1.7.")
    listing = read_layers(directory)
    assert listing["memory"]["weights"] > 100_000
    assert len(listing["memory"]["activations"]) == 2
    fused = [layer for layer in listing["layers"] if any("paged_attention" in name for name in layer["nodes"])]
    assert any("mha" in layer["name"] for layer in fused)
    assert {kind for layer in fused for kind in layer["outputs"]} <= {"BFloat16", "Bool", "Int32", "Int64"}


def test_same_program_gives_the_same_bytes(llama, tmp_path: Path) -> None:
    program, directory, _ = llama
    build(program, tmp_path / "a folder with another name", "86,89,120")
    for name in (rtx.ENGINE, rtx.LAYERS, "plan/model.onnx"):
        first, second = (
            hashlib.sha256((place / name).read_bytes()).hexdigest()
            for place in (directory, tmp_path / "a folder with another name")
        )
        assert first == second, name


def test_engine_is_refused_without_its_gpu(llama) -> None:
    """TensorRT reads the engine's head before it looks for a GPU: the file is one of its own."""
    import tensorrt_rtx as trt

    _, directory, _ = llama

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity, message) -> None:
            self.messages.append(message)

    log = Log()
    runtime = trt.Runtime(log)
    if runtime.deserialize_cuda_engine((directory / rtx.ENGINE).read_bytes()) is None:
        assert any("Cuda Runtime" in text or "compute capability" in text for text in log.messages), log.messages


@pytest.mark.parametrize(
    ("family", "recipe", "kind"),
    [
        ("llama", "int8-wo-channel", "Int8"),
        ("llama", "int4-wo-g32", "Int4"),
        ("qwen3", "int4-wo-g32", "Int4"),
        ("mixtral", "int4-wo-g32", "Int4"),
    ],
)
def test_quantized_weights_stay_small(family: str, recipe: str, kind: str, tmp_path: Path) -> None:
    program = optimized(family, recipe, dtype=BF16)
    compiled = build(program, tmp_path / "engine")
    assert program.rewrites[-1].name == "tensorrt_weights"
    assert program.rewrites[-1].count > 4
    weights = {each for layer in read_layers(tmp_path / "engine")["layers"] for each in layer["weights"]}
    assert kind in weights, weights
    assert any(name.startswith("int") for name in compiled.weight_bytes)


def test_weights_that_cannot_stay_small_are_said() -> None:
    program = optimized("llama", "int4-wo-g32-asym", dtype=BF16)
    assert rtx.kept_small(program, "bfloat16").declined == [
        "1 weight(s) stored in bfloat16: 8 bits in groups of 32, not one scale a row",
        "8 weight(s) stored in bfloat16: int4 per group 32, asymmetric: not symmetric",
    ]


# ------------------------------------------------------------------------------------------------- what is refused
def test_bfloat16_needs_a_gpu_that_has_it(tmp_path: Path) -> None:
    program = optimized("llama", dtype=BF16)
    with pytest.raises(UnsupportedError, match="SM 75 has no bfloat16") as caught:
        build(program, tmp_path / "engine", "75,86")
    assert caught.value.hint == "use --dtype float16, or --sm with 80 and above"
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("90", "tensorrt-rtx does not build for SM 90"),
        ("89,100", "tensorrt-rtx does not build for SM 100"),
        ("ada", "'ada' is no list of SMs"),
    ],
)
def test_unknown_gpus(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RTX.parse_sms(text)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "the package tensorrt-rtx (>=1.7,<1.8) is missing: pip install 'llmbuild[tensorrt-rtx]'"),
        ("1.2.0.54", "tensorrt-rtx 1.2.0.54 is installed, but >=1.7,<1.8 is needed: pip install"),
        ("1.9.0", "tensorrt-rtx 1.9.0 is installed, but >=1.7,<1.8 is needed: pip install"),
    ],
)
def test_package_missing_or_of_another_version(found: str | None, message: str, monkeypatch) -> None:
    from importlib import metadata

    def version(package: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(metadata, "version", version)
    problem = rtx.RtxTarget().probe()
    assert problem is not None and problem.startswith(message)


def test_engine_larger_than_memory(monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"TensorRT needs about .* of memory to build an engine with 1,125,899\.9 GB"):
        rtx.check_memory(1 << 50)
    rtx.check_memory(1 << 20)


def test_operators_that_the_parser_refuses_are_named_with_their_lines(llama) -> None:
    program, _, _ = llama
    linears = [node.name for node in program.graph.nodes if "linear" in node.name][:2]
    error = running.refused([[f"{linears[0]}.1", "no kernel"], [linears[1], "bad type"]], program)
    assert "refuses 2 operator(s)" in error.what
    assert error.what.count(".py:") == 2 and "no kernel" in error.what and "bad type" in error.what


def test_a_dead_builder_is_a_message(llama, tmp_path: Path) -> None:
    program, _, _ = llama
    with pytest.raises(LLMBuildError, match=r"TensorRT's builder ended with code 1: .*weights"):
        running.run_builder(
            {"module": "tensorrt_rtx", "weights": "weights/none", "model": "m", "engine": "e"}, tmp_path, program
        )


# ------------------------------------------------------------------------------------------------ builder options
def test_options_as_trtexec_names_them() -> None:
    options = "builderOptimizationLevel=5 profilingVerbosity=none memPoolSize=workspace:512 maxAuxStreams=0 noTF32 "
    options += "tilingOptimizationLevel=fast allowWeightStreaming sparsity=enable prefillBatchSize=2"
    assert parse(options.split()) == BuilderOptions(5, "none", 512 << 20, 0, "fast", True, False, True, 2)
    assert parse(["memPoolSize=workspace:2GiB"]).workspace == 2 << 30
    assert parse([]) == BuilderOptions()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("builderOptimizationLevel=6", "builderOptimizationLevel is '6'"),
        ("profilingVerbosity=loud", "profilingVerbosity is 'loud'"),
        ("memPoolSize=dlaSRAM:3", "memPoolSize is 'dlaSRAM:3'"),
        ("memPoolSize=workspace:many", "memPoolSize is 'workspace:many'"),
        ("noTF32=maybe", "noTF32 is 'maybe'"),
        ("sparsity", "sparsity is ''"),
        ("fp16", "unknown builder option 'fp16'"),
        ("stripWeights", "strips an engine of its weights only with the GPU at hand"),
        ("refit", "refittable engines only with the GPU at hand"),
        ("timingCacheFile=x", "times nothing while it builds"),
    ],
)
def test_options_that_are_refused(option: str, message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        parse([option])


def test_an_option_given_twice() -> None:
    with pytest.raises(ConfigError, match="noTF32 is given twice"):
        parse(["noTF32", "noTF32=false"])


def test_profiles_follow_the_limits() -> None:
    prompts, decode = profiles(
        {"input_ids": ["B", "T"], "keys.0": ["B", 2, 48, 16], "logits_indices": ["L"]}, LIMITS, 2
    )
    assert prompts["input_ids"] == [[1, 1], [1, 32], [2, 32]]
    assert decode["input_ids"] == [[1, 1], [2, 1], [4, 1]]
    assert decode["keys.0"][2] == [4, 2, 48, 16]
    assert (prompts["logits_indices"][2], decode["logits_indices"][2]) == ([2], [4])


def test_layers_of_a_log() -> None:
    line = (
        "Name: _gemm_mha_v2_myl1_14, LayerType: kgen, Inputs: [ { Name: q, Dimensions: [-1], Datatype: BFloat16 }, "
        "{ Name: m, Datatype: Int32 }], Constants: [ { Name: w, Datatype: Int4 }], Outputs: [ { Name: o, "
        "Datatype: Float }], TacticName: t, StreamId: 0, Metadata: [ONNX Layer: paged_attention.1][ONNX Layer: rope]"
    )
    assert layers(["Total Weights Memory: 3 bytes", f"Layers:\n{line}\n\nI/O Tensors:\n Name: x"]) == [
        {
            "name": "_gemm_mha_v2_myl1_14",
            "kind": "kgen",
            "profile": 1,
            "inputs": ["BFloat16", "Int32"],
            "weights": ["Int4"],
            "outputs": ["Float"],
            "nodes": ["paged_attention", "rope"],
        }
    ]


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        (
            dict(sm="89,90"),
            ConfigError,
            "tensorrt-rtx does not build for SM 90\n  where: --sm\n  next:  tensorrt-rtx builds for 75, 80, 86, 89,",
        ),
        (
            dict(quant="fp8", sm="86,89"),
            UnsupportedError,
            "SM 86 cannot multiply 8-bit floats, which recipe 'fp8' asks for",
        ),
        (
            dict(builder_options=("builderOptimisationLevel=5",)),
            ConfigError,
            "unknown builder option 'builderOptimisationLevel'\n  where: --builder-option\n"
            "  next:  did you mean 'builderOptimizationLevel'?",
        ),
    ],
)
def test_what_convert_refuses_before_it_starts(changes: dict, kind: type, text: str, tmp_path: Path) -> None:
    with pytest.raises(kind) as caught:
        choose(BuildConfig(model=tmp_path, output=tmp_path / "e", target="tensorrt-rtx", **changes))
    assert str(caught.value).startswith(text)


def test_inspect_shows_layers_profiles_and_memory(llama, capsys) -> None:
    _, directory, compiled = llama
    target = SimpleNamespace(section=compiled.section)
    engine = SimpleNamespace(manifest=SimpleNamespace(target=target), file=lambda name: directory / name)
    print_layers_of(engine)  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert "paged" in shown and "BFloat16" in shown
    assert "Profile 0" in shown and "Profile 1" in shown and "of activations" in shown
    assert "layers, " in shown and "of weights" in shown


def test_products_of_8_bit_floats_build_where_a_gpu_has_them(tmp_path: Path) -> None:
    program = optimized("qwen3", "fp8", dtype=BF16)
    with pytest.raises(UnsupportedError, match="SM 86 has no 8-bit floats"):
        build(program, tmp_path / "refused", "86,89")
    compiled = build(program, tmp_path / "engine", "89,120")
    assert compiled.weight_bytes["float8_e4m3fn"] > 50_000
    weights = {each for layer in read_layers(tmp_path / "engine")["layers"] for each in layer["weights"]}
    assert any("FP8" in each.upper() or "FLOAT8" in each.upper() for each in weights), weights
