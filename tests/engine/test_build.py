"""`build()` with fakes at its seams: what it asks of each phase, what it writes, what it leaves after a failure."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from llmbuild.builder import options
from llmbuild.builder.build import BuildConfig, build
from llmbuild.builder.ir import BlockPart, Constant, LayerKV, ModelInfo, Program, Rewrite
from llmbuild.builder.sections import least_weight_bytes
from llmbuild.builder.targets.base import CompiledTarget, CompileOptions
from llmbuild.engine.reader import open_engine
from llmbuild.engine.verify import verify
from llmbuild.errors import ConfigError, EngineError, UnsupportedError, UserError
from llmbuild.quantization.blocks import BlockFormat
from support.fake_engine import tree

INFO = ModelInfo(
    name="tiny",
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=4,
    num_layers=1,
    max_position_embeddings=6000,
    bos_token_id=None,
    eos_token_ids=(2, 3),
    pad_token_id=None,
    source_kind="huggingface",
    source_files=(("model.safetensors", 5, "0" * 64),),
)


class Seams:
    """Fake phases; each can be told to fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, BaseException] = {}
        self.missing: str | None = None
        self.info = INFO
        self.options: CompileOptions | None = None
        self.recipe: Any = None

    def load_program(
        self,
        path: Path,
        *,
        dtype: Any,
        max_seq_len: int | None,
        progress: Any,
        trust_remote_code: bool,
        ignore_config_keys: tuple[str, ...] = (),
    ) -> Program:
        self._call("load")
        progress(1, 1, "tracing")
        graph = fx.Graph()
        graph.output((graph.placeholder("input_ids"), graph.placeholder("w")))
        return Program(
            graph=graph,
            weights={"w": Constant(torch.zeros(8, 4, dtype=dtype))},
            info=self.info,
            kv_layers=(LayerKV(2, 8, 8, None),),
            tokenizer_files={"tokenizer.json": b"{}", "generation_config.json": b"{}"},
        )

    def optimize(self, program: Program, recipe: Any, *, calibrate: Any = None, after_pass: Any = None) -> None:
        self._call("optimize")
        self.recipe = recipe
        program.rewrites.append(Rewrite("a+b ⇒ c", 2, ["shape (3,) is odd"]))

    def find_target(self, name: str) -> Any:
        return SimpleNamespace(name=name, dtypes=("float32",), probe=lambda: self.missing, compile=self.compile)

    def compile(self, program: Program, options: CompileOptions, directory: Path) -> CompiledTarget:
        self.options = options
        (directory / "plan").mkdir()
        (directory / "plan" / "graph").write_bytes(b"graph")
        self._call("compile")
        assert options.progress is not None
        options.progress(1, 2, "w")
        return CompiledTarget({"numpy": ">=1"}, {"onnx": "1"}, {"graph": "plan/graph"}, {"float32": 128})

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]


@pytest.fixture
def seams(monkeypatch) -> Seams:
    fakes = Seams()
    modules = {
        "llmbuild.builder.frontend.load": SimpleNamespace(load_program=fakes.load_program),
        "llmbuild.builder.pipeline": SimpleNamespace(optimize=fakes.optimize),
        "llmbuild.builder.targets.registry": SimpleNamespace(find_target=fakes.find_target, TARGETS={"cpu": "fake"}),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fakes


def config(tmp_path: Path, **changes: Any) -> BuildConfig:
    return BuildConfig(**{"model": tmp_path / "model", "output": tmp_path / "e", **changes})


def test_build_writes_a_whole_engine_and_says_what_it_chose(tmp_path, seams):
    told: list[tuple[str, int, int, str]] = []
    report = build(config(tmp_path), progress=lambda *step: told.append(step))
    assert verify(tmp_path / "e") == []
    manifest = open_engine(tmp_path / "e").manifest
    assert manifest == report.manifest
    assert manifest.model.eos_token_ids == [2, 3]
    assert manifest.limits.model_dump() == {"max_batch_size": 16, "max_num_tokens": 512, "max_seq_len": 4096}
    assert manifest.precision.model_dump() == {"dtype": "float32", "recipe": "none", "weights": {"float32": 128}}
    assert set(tree(tmp_path / "e")) == {
        "engine.json",
        "engine.json.sha256",
        "plan/graph",
        "report.json",
        "tokenizer/generation_config.json",
        "tokenizer/tokenizer.json",
    }
    assert json.loads((tmp_path / "e" / "report.json").read_text()) == {
        "report_version": 1,
        "graph_nodes": {"traced": 3, "optimized": 3},
        "passes": [{"name": "a+b ⇒ c", "count": 2, "declined": ["shape (3,) is odd"]}],
        "weight_bytes": {"float32": 128},
    }
    assert report.notes == [
        "target cpu: --target cuda makes an engine for NVIDIA GPUs",
        "quant none: no quantization",
        "dtype float32: what the cpu target computes in",
        "max_seq_len 4096: the model was made for 6000, --max-seq-len raises the limit",
        "max_num_tokens 512: longer prompts are processed in chunks of that many tokens",
    ]
    assert [step[0] for step in told if step[1] == step[2] or step[0] == "weights"][:2] == ["trace", "weights"]
    assert told[-1][:2] == ("write", told[-1][2])
    assert list(report.seconds) == ["start", "trace", "passes", "weights", "write"]


def test_what_is_given_is_not_noted(tmp_path, seams):
    given = dict(target="cpu", dtype="float32", quant="int4-wo", max_batch_size=3, max_num_tokens=7, max_seq_len=6000)
    report = build(config(tmp_path, **given))
    assert report.notes == []
    assert report.manifest.build.options == given
    assert seams.recipe.name == "int4-wo"
    assert seams.options is not None and seams.options.limits.max_seq_len == 6000


def test_gguf_keeps_its_blocks_by_default(tmp_path, seams):
    report = build(config(tmp_path, model=tmp_path / "m.gguf"))
    assert seams.recipe.name == "gguf"
    assert "quant gguf: the file's own blocks, kept as they are" in report.notes


def test_large_batches_raise_the_token_budget(tmp_path, seams):
    assert build(config(tmp_path, max_batch_size=600)).manifest.limits.max_num_tokens == 600


def test_paths_and_times_leave_no_trace(tmp_path, seams):
    build(config(tmp_path, output=tmp_path / "first"))
    os.utime(tmp_path / "first" / "plan" / "graph", (1, 1))
    build(config(tmp_path, output=tmp_path / "deep" / "second"))
    assert tree(tmp_path / "first") == tree(tmp_path / "deep" / "second")
    for content in tree(tmp_path / "first").values():
        assert str(tmp_path).encode() not in content


# --- refusals, before any work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        (
            dict(builder_options=("noTF32",)),
            ConfigError,
            "the cpu target has no builder of a vendor to give options to\n  where: --builder-option",
        ),
        (dict(sm="90"), ConfigError, "the cpu target is compiled for no GPU\n  where: --sm\n  next:  leave --sm out"),
        (dict(target="cpuu"), ConfigError, "unknown target 'cpuu'\n  where: --target\n  next:  did you mean 'cpu'?"),
        (
            dict(dtype="bfloat16"),
            UnsupportedError,
            "the cpu target does not compute in bfloat16\n  where: --dtype\n"
            "  next:  use --dtype float32; --quant int8-wo or int4-wo makes the engine smaller",
        ),
        (
            dict(dtype="fp32"),
            ConfigError,
            "unknown dtype 'fp32'\n  where: --dtype\n  next:  known: bfloat16, float16, float32",
        ),
        (dict(quant="int4"), ConfigError, "unknown quantization recipe 'int4'"),
        (dict(quant="gguf"), ConfigError, "the recipe 'gguf' keeps the blocks of a GGUF file, but model is not one"),
    ],
)
def test_names_that_are_refused(tmp_path, seams, changes, kind, text):
    with pytest.raises(kind) as error:
        build(config(tmp_path, **changes))
    assert str(error.value).startswith(text)
    assert seams.calls == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(max_batch_size=0), "max_batch_size is 0\n  where: --max-batch-size\n  next:  it must be an integer of"),
        (dict(max_num_tokens=-1), "max_num_tokens is -1\n"),
        (dict(max_seq_len=1), "max_seq_len is 1\n"),
        (dict(max_seq_len=True), "max_seq_len is True\n"),
        (dict(max_batch_size="4"), "max_batch_size is '4'\n"),
        (dict(max_num_tokens=8), "max_num_tokens is 8, but max_batch_size is 16\n  where: --max-num-tokens\n"),
    ],
)
def test_limits_that_cannot_be(tmp_path, changes, text):
    with pytest.raises(ConfigError) as error:
        config(tmp_path, **changes)
    assert str(error.value).startswith(text)


def test_longer_than_the_model_was_made_for(tmp_path, seams):
    with pytest.raises(ConfigError) as error:
        build(config(tmp_path, max_seq_len=6001))
    assert str(error.value) == (
        "max_seq_len is 6001, but tiny was made for sequences of at most 6000 tokens\n"
        "  where: --max-seq-len\n  next:  give at most 6000"
    )
    assert os.listdir(tmp_path) == []


def test_short_model_is_not_capped(tmp_path, seams):
    seams.info = replace(INFO, max_position_embeddings=100)
    report = build(config(tmp_path))
    assert "max_seq_len 100: the model was made for 100" in report.notes


def test_existing_output_is_refused_before_any_work(tmp_path, seams):
    build(config(tmp_path))
    seams.calls.clear()
    with pytest.raises(ConfigError, match="exists"):
        build(config(tmp_path))
    assert seams.calls == []
    build(config(tmp_path, force=True))
    assert verify(tmp_path / "e") == []


def test_missing_build_packages_are_named(tmp_path, seams, monkeypatch):
    monkeypatch.setattr(options, "BUILD_PACKAGES", ("torch", "no_such_package_a", "no_such_package_b"))
    with pytest.raises(ConfigError) as error:
        build(config(tmp_path))
    assert str(error.value) == (
        "converting a model needs packages that are not installed: no_such_package_a, no_such_package_b\n"
        '  next:  pip install "llmbuild[build]"; running an engine does not need them'
    )


def test_target_that_cannot_build_here(tmp_path, seams):
    seams.missing = "no compiler, install g++"
    with pytest.raises(ConfigError) as error:
        build(config(tmp_path))
    assert str(error.value) == "the cpu target cannot build here: no compiler, install g++\n  where: --target"


# --- failures on the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["load", "optimize", "compile"])
@pytest.mark.parametrize("kind", [UserError, KeyboardInterrupt, MemoryError])
def test_failure_leaves_nothing(tmp_path, seams, place, kind):
    seams.fail[place] = kind("stop")
    with pytest.raises(kind):
        build(config(tmp_path))
    assert os.listdir(tmp_path) == []


def test_failure_with_force_keeps_the_old_engine(tmp_path, seams):
    build(config(tmp_path))
    before = tree(tmp_path / "e")
    seams.fail["compile"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        build(config(tmp_path, force=True, max_batch_size=2))
    assert tree(tmp_path / "e") == before
    assert os.listdir(tmp_path) == ["e"]


def test_disk_full_while_weights_are_written(tmp_path, seams):
    seams.fail["compile"] = OSError(28, "No space left on device")
    with pytest.raises(
        EngineError, match="the disk is full: the engine needs about 128 bytes, 5 bytes had been written"
    ):
        build(config(tmp_path))
    assert os.listdir(tmp_path) == []


def test_least_size_counts_blocks_at_their_width(seams):
    class Stored(Constant):
        block_format = BlockFormat(bits=4, block_size=32, zero=8, has_offset=False, source="Q4_0")

    program = seams.load_program(
        Path(), dtype=torch.float32, max_seq_len=None, progress=lambda *step: None, trust_remote_code=False
    )
    assert least_weight_bytes(program) == 8 * 4 * 4
    weight = Stored(torch.zeros(16, 64))
    program.weights = {"q": BlockPart(weight, "q"), "scale": BlockPart(weight, "scale")}
    assert least_weight_bytes(program) == 16 * 64 // 2 + 16 * 2 * 2


def test_the_package_exports_the_build():
    import llmbuild

    assert llmbuild.build is build
    assert llmbuild.BuildConfig is BuildConfig
    assert llmbuild.BuildReport.__name__ == "BuildReport"
