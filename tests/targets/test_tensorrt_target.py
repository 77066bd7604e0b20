"""The tensorrt target: everything up to the vendor's library, with tensorrt-rtx standing in for that."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from llmbuild.builder.options import BuildConfig, choose
from llmbuild.builder.targets.base import CompileOptions, Limits
from llmbuild.builder.targets.tensorrt import builder_options, running, target
from llmbuild.builder.targets.tensorrt.capabilities import TENSORRT
from llmbuild.builder.targets.tensorrt.gpu_here import GpuHere, gpu_here
from llmbuild.builder.targets.tensorrt.layers import inspected_layers
from llmbuild.builder.targets.tensorrt.opened import allow_refitting, opened
from llmbuild.builder.targets.tensorrt.profiles import most_slots, paged_profiles
from llmbuild.builder.targets.tensorrt.running import LAYERS
from llmbuild.cli.layers import print_layers_of
from llmbuild.engine.mapped import MappedWeights
from llmbuild.errors import ConfigError, DeviceError, LLMBuildError, UnsupportedError
from support.fake_tensorrt import FakeEngine, FakeTensorRT, write_weights
from support.traced import optimized

LIMITS = Limits(max_batch_size=4, max_num_tokens=32, max_seq_len=40, block_size=8)
STANDIN = Path(__file__).parents[1] / "support" / "standin"
ADA = GpuHere("Ada", 89, 4)
KEPT: list[Any] = []
needs_rtx = pytest.mark.skipif("tensorrt_rtx" not in str(metadata.packages_distributions()), reason="no tensorrt-rtx")


def compiled(program: Any, directory: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **changes: Any):
    """Compile with the stand-in, on a GPU that is not there."""
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "11.4.0.106" if name == "tensorrt" else found(name))
    monkeypatch.setattr(target, "gpu_here", lambda: changes.pop("gpu", ADA))
    monkeypatch.setenv("PYTHONPATH", str(STANDIN))
    made = CompileOptions(LIMITS, changes.pop("dtype", "bfloat16"), None, changes.pop("sm", None), options)
    return target.TensorRTTarget().compile(program, made, directory)


@needs_rtx
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("mistral", "none"),
        pytest.param("gpt_oss", "none", marks=pytest.mark.slow),
        pytest.param("gemma2", "int8-wo-channel", marks=pytest.mark.slow),
        pytest.param("qwen3", "fp8", marks=pytest.mark.slow),
        pytest.param("llama", "int4-wo-g32", marks=pytest.mark.slow),
        pytest.param("mixtral", "none", marks=pytest.mark.slow),
    ],
)
def test_all_but_the_plugin_goes_through_a_builder(family, recipe, tmp_path, monkeypatch, capsys) -> None:
    """The graph is parsed and built, and the plugins are made by the registered creator from what the graph says."""
    program = optimized(family, recipe, dtype=torch.bfloat16)
    made = compiled(program, tmp_path / "engine", monkeypatch)
    files = sorted(path.name for path in (tmp_path / "engine").rglob("*") if path.is_file())
    assert files == ["layers.json", "model.onnx", "tensorrt.engine"]  # weights and kernels went into the engine
    assert made.requires == {"tensorrt": "==11.4.0.106"}
    assert (made.section["sm"], made.section["table_stride"], made.block_size) == (89, 5, None)
    listing = json.loads((tmp_path / "engine" / LAYERS).read_text())
    attention = [node.name for node in program.graph.nodes if "paged_attention" in str(node.target)]
    # Where sinks are cast for a node, the cast comes first and has the bare name.
    assert [name.split(".")[0] for name in listing["plugins"]] == attention
    assert [layer["name"] for layer in listing["layers"]] == list(listing["plugins"])
    assert [layer["nodes"] for layer in listing["layers"]] == [[name] for name in attention]
    assert all(layer["outputs"] == ["BF16"] * 3 for layer in listing["layers"])
    assert [fields["layer"] for fields in listing["plugins"].values()] == [0, 1]
    assert listing["memory"]["activations"] == [1000, 1001]

    engine = SimpleNamespace(manifest=SimpleNamespace(target=made), file=lambda name: tmp_path / "engine" / name)
    print_layers_of(engine)  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert "Fields of the plugins" in shown and "kv_heads" in shown and "PluginV3" in shown


@needs_rtx
def test_an_engine_that_stores_its_kernels(tmp_path, monkeypatch, capsys) -> None:
    """Two nodes a layer, made by the registered creators; what loads the engine needs no plugin."""
    program = optimized("mistral", dtype=torch.bfloat16)
    made = compiled(program, tmp_path / "engine", monkeypatch, "attention=stored")
    files = sorted(path.name for path in (tmp_path / "engine").rglob("*") if path.is_file())
    assert files == ["layers.json", "model.onnx", "tensorrt.engine"]
    assert made.section["plugin"] is None and made.section["options"]["attention"] == "stored"
    listing = json.loads((tmp_path / "engine" / LAYERS).read_text())
    attention = [node.name for node in program.graph.nodes if "paged_attention" in str(node.target)]
    told = {name: (each["plugin"], each["layer"], each["window"]) for name, each in listing["plugins"].items()}
    assert told == {
        f"{attention[0]}.store": ("PagedStore", 0, 6),
        attention[0]: ("PagedAttend", 0, 6),
        f"{attention[1]}.store": ("PagedStore", 1, 6),
        attention[1]: ("PagedAttend", 1, 6),
    }
    assert [layer["outputs"] for layer in listing["layers"]] == [["BF16"] * 2, ["BF16"]] * 2
    assert [layer["nodes"] for layer in listing["layers"]] == [[name] for name in attention for _ in range(2)]
    graph = onnx.load(tmp_path / "engine" / "plan/model.onnx", load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type in ("PagedStore", "PagedAttend")]
    assert [list(node.input)[1:3] for node in nodes[1::2]] == [list(node.output) for node in nodes[::2]]
    assert [list(node.output) for node in nodes[::2]] == [
        ["keys.0.out", "values.0.out"],
        ["keys.1.out", "values.1.out"],
    ]

    engine = SimpleNamespace(manifest=SimpleNamespace(target=made), file=lambda name: tmp_path / "engine" / name)
    print_layers_of(engine)  # type: ignore[arg-type]
    assert "PagedStore" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- engines without weights
@needs_rtx
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("none", ("stripWeights",)),
        pytest.param("int4-wo-g32", ("stripWeights",), marks=pytest.mark.slow),
        pytest.param("none", ("stripWeights", "refit"), marks=pytest.mark.slow),
    ],
)
def test_a_stripped_engine_keeps_its_weights_beside_it(recipe, options, tmp_path, monkeypatch, capsys) -> None:
    """The stand-in asks for every weight, the graph's constants too, and compares what comes with what was parsed."""
    program = optimized("mistral", recipe, dtype=torch.bfloat16)
    made = compiled(program, tmp_path / "engine", monkeypatch, *options)
    files = sorted(path.name for path in (tmp_path / "engine").rglob("*") if path.is_file())
    assert files == ["layers.json", "model.onnx", "tensorrt.engine", "tensorrt.safetensors"]
    assert made.section["weights"] == "weights/tensorrt.safetensors"
    assert made.section["options"]["strip_weights"] and made.section["options"]["refit"] == ("refit" in options)
    listing = json.loads((tmp_path / "engine" / LAYERS).read_text())
    graph = onnx.load(tmp_path / "engine" / "plan/model.onnx", load_external_data=False).graph
    outside = [each for each in graph.initializer if each.data_location == onnx.TensorProto.EXTERNAL]
    # All can be asked for where the same weights come back; where others may come, those of the file.
    assert listing["stripped"] == (len(outside) if "refit" in options else len(graph.initializer)) > 0
    assert "constant" not in made.weight_bytes

    engine = SimpleNamespace(manifest=SimpleNamespace(target=made), file=lambda name: tmp_path / "engine" / name)
    print_layers_of(engine)  # type: ignore[arg-type]
    assert "weights beside the engine" in capsys.readouterr().out.replace("\n", " ")


def test_a_name_that_the_weights_lack_fails_the_build(tmp_path, monkeypatch) -> None:
    """What TensorRT folded may have a name of TensorRT's own."""
    write_weights(tmp_path / "w", {"a": ("F32", bytes(8))})
    (tmp_path / "e").write_bytes(b"engine")
    engine = FakeEngine(asks={"a": ("FLOAT", 2), "folded_7": ("FLOAT", 2)})
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRT(engine))
    log = SimpleNamespace(errors=[], reason=lambda: "no reason")
    order = {"engine": str(tmp_path / "e"), "options": {"strip_weights": True, "refit": False}}
    result = opened(log, order, MappedWeights(tmp_path / "w"))
    assert result["errors"] == [
        "its engine without weights cannot be filled again: TensorRT asks for 1 weight(s) that the file does not hold: "
        "folded_7"
    ]
    done = SimpleNamespace(returncode=0, stdout=json.dumps(result))
    monkeypatch.setattr(running.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(LLMBuildError, match="folded_7") as caught:
        running.run_builder({"engine": "plan/e"}, tmp_path, SimpleNamespace())  # type: ignore[arg-type]
    assert "leave stripWeights out, or give refit beside it" in str(caught.value.hint)


def parsed(weights: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Return (network, configuration) of tensorrt-rtx for y = x @ w."""
    import tensorrt_rtx as trt

    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 4]) for name in "xy")
    held = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], held)
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    parser = trt.OnnxParser(network, log)
    assert parser.parse(model.SerializeToString())
    KEPT.extend((builder, parser, log))  # the network refers to them
    return network, builder.create_builder_config()


@needs_rtx
def test_weights_that_may_be_replaced_are_named_to_tensorrt(monkeypatch) -> None:
    """By the name of their initializer, in the network that the vendor's parser made."""
    import tensorrt_rtx

    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_rtx)
    network, config = parsed({"w": np.ones((4, 4), np.float32)})
    order = {"options": {"strip_weights": True, "refit": True}, "initializers": ["w", "nobody"]}
    assert allow_refitting(config, network, order) == ["nobody"]
    flags = tensorrt_rtx.BuilderFlag
    assert config.get_flag(flags.STRIP_PLAN) and config.get_flag(flags.REFIT_INDIVIDUAL)
    assert not config.get_flag(flags.REFIT_IDENTICAL)
    _, same = parsed({"w": np.ones((4, 4), np.float32)})
    assert allow_refitting(same, network, {"options": {"strip_weights": True, "refit": False}}) == []
    assert same.get_flag(flags.STRIP_PLAN) and same.get_flag(flags.REFIT_IDENTICAL)


# ------------------------------------------------------------------------------------------------- what is refused
def test_a_missing_package_is_said_with_its_versions() -> None:
    if TENSORRT.problem() is None:
        pytest.skip("tensorrt is installed")
    problem = target.TensorRTTarget().probe()
    assert problem == "the package tensorrt (>=10.15,<12) is missing: pip install 'llmbuild[tensorrt]'"


@pytest.mark.parametrize("found", ["8.6.1", "10.14.1.48", "12.0.0.1"])
def test_other_versions(found: str, monkeypatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: found)
    problem = target.TensorRTTarget().probe()
    assert problem is not None
    assert problem.startswith(f"tensorrt {found} is installed, but >=10.15,<12 is needed: pip install")


def test_a_builder_without_a_gpu() -> None:
    if torch.cuda.is_available():
        assert gpu_here().sm >= 70
        return
    with pytest.raises(DeviceError, match="TensorRT builds on a GPU, and no") as caught:
        gpu_here()
    assert "--target tensorrt-rtx build without a GPU" in str(caught.value.hint)


def test_a_gpu_that_is_not_asked_for_or_has_no_kernels() -> None:
    assert target.check_gpu(ADA, None) is target.check_gpu(ADA, "86,89") is ADA
    with pytest.raises(ConfigError, match="the GPU here is SM 89, and --sm asks for 90"):
        target.check_gpu(ADA, "90")
    with pytest.raises(ConfigError, match="the plugin has no kernels for SM 75"):
        target.check_gpu(GpuHere("Turing", 75, 4), None)


def test_a_recipe_that_the_gpu_cannot_multiply(tmp_path, monkeypatch) -> None:
    weights = {"w": SimpleNamespace(dtype=torch.float8_e4m3fn)}
    with pytest.raises(UnsupportedError, match="SM 86 has no 8-bit floats"):
        compiled(SimpleNamespace(weights=weights), tmp_path / "e", monkeypatch, gpu=GpuHere("Ampere", 86, 4))
    assert not (tmp_path / "e").exists()


def test_library_that_is_missing_behind_the_bindings(tmp_path, monkeypatch) -> None:
    """The process that builds says why it cannot begin."""
    (tmp_path / "broken" / "tensorrt").mkdir(parents=True)
    (tmp_path / "broken" / "tensorrt" / "__init__.py").write_text("raise ImportError('libnvinfer.so.11: not found')")
    from llmbuild.builder.targets.tensorrt.running import run_builder

    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    order = {"module": "tensorrt", "engine": "plan/e"}
    with pytest.raises(LLMBuildError, match=r"builder ended with code 1: ImportError: libnvinfer.so.11: not found"):
        run_builder(order, tmp_path, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("hardwareCompatibilityLevel=ampere+", "kernels are for the one GPU that the engine is built on"),
        ("versionCompatible", "takes no plugin"),
        ("prefillBatchSize=2", "prompts are packed, not padded"),
        ("timingCacheFile=/nowhere/times", "timingCacheFile is '/nowhere/times'"),
        ("attention=aot", "the builder option attention is 'aot'"),
    ],
)
def test_options_that_are_refused(option: str, message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        builder_options.parse([option], "tensorrt")


def test_options_of_a_build(tmp_path: Path) -> None:
    made = builder_options.parse([f"timingCacheFile={tmp_path}/times", "noTF32"], "tensorrt")
    assert made.timing_cache == f"{tmp_path}/times" and not made.tf32
    assert "timing_cache" not in made.to_dict()  # paths of this machine stay out of engines
    config = BuildConfig(model=tmp_path, output=tmp_path / "e", target="tensorrt", quant="fp8")
    found = choose(config)
    assert found.sm is None and "sm: that of the GPU here" in found.notes


def test_profiles_of_packed_steps() -> None:
    inputs = {"input_ids": ["T"], "cu_q_lens": ["B+1"], "block_tables": ["B", 5], "keys.0": ["slots", 2, 16]}
    mixed, decode = paged_profiles({**inputs, "logits_indices": ["L"]}, LIMITS)
    assert mixed["input_ids"] == [[1], [16], [32]] and decode["input_ids"] == [[1], [2], [4]]
    assert mixed["cu_q_lens"] == decode["cu_q_lens"] == [[2], [3], [5]]
    assert decode["block_tables"][2] == [4, 5]
    assert mixed["keys.0"][0] == [8, 2, 16] and mixed["keys.0"][2] == [(2**31 - 1) // 32 // 8 * 8, 2, 16]
    assert most_slots(inputs, LIMITS) * 32 < 2**31


def test_layers_that_an_engine_tells_of_itself() -> None:
    told = {
        "Name": "linear_3+silu [profile 1]",
        "LayerType": "gemm",
        "Inputs": [{"Name": "x", "Format/Datatype": "BFloat16"}],
        "Outputs": [{"Name": "y", "Format/Datatype": "Half"}],
        "Weights": {"Type": "Int4", "Count": 12},
        "Bias": {"Type": "", "Count": 0},
        "Metadata": "[ONNX Layer: linear_3]\x1e[ONNX Layer: silu.1]",
    }
    assert inspected_layers(json.dumps({"Layers": [told, "a name alone"]})) == [
        {
            "name": "linear_3+silu [profile 1]",
            "kind": "gemm",
            "profile": 1,
            "inputs": ["BFloat16"],
            "weights": ["Int4"],
            "outputs": ["Half"],
            "nodes": ["linear_3", "silu"],
        },
        {
            "name": "a name alone",
            "kind": "",
            "profile": 0,
            "inputs": [],
            "weights": [],
            "outputs": [],
            "nodes": [],
        },
    ]
