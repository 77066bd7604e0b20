"""`llmbuild convert` for real, on a tiny Llama: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbuild.engine.reader import open_engine
from llmbuild.engine.verify import verify
from support.fake_engine import tree
from support.tiny_gguf import write_gguf
from support.tiny_models import save_tiny, tiny_model

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """`one/` (one weights file) and `sharded/`."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(tiny_model("llama"), folder / "one")
    save_tiny(tiny_model("llama"), folder / "sharded", max_shard_size="60KB")
    return folder


@pytest.fixture(scope="module")
def converted(models, tmp_path_factory) -> Path:
    """An engine of `one/`, made by the command in a process of its own."""
    out = tmp_path_factory.mktemp("engines") / "one.engine"
    done = convert(models / "one", out, "--max-seq-len", "128", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # one JSON object and nothing else
    assert told["engine"] == str(out)
    assert (told["target"], told["dtype"], told["quant"]) == ("cpu", "float32", "none")
    assert told["limits"] == {"max_batch_size": 16, "max_num_tokens": 512, "max_seq_len": 128}
    listed = [path for path in out.rglob("*") if path.is_file() and not path.name.startswith("engine.json")]
    assert told["bytes"] == sum(path.stat().st_size for path in listed)
    assert any(entry["count"] > 0 for entry in told["passes"])
    assert "target cpu: --target cuda makes an engine for NVIDIA GPUs" in told["notes"]
    return out


def convert(model: Path, out: Path, *words: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "llmbuild", "convert", str(model), "-o", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_converted_engine_is_whole(converted):
    assert verify(converted) == []
    assert open_engine(converted).manifest.model.architecture == "LlamaForCausalLM"


def test_twice_gives_the_same_bytes(converted, models, tmp_path, invoke):
    result = invoke("convert", models / "one", "-o", tmp_path / "again", "--max-seq-len", 128)
    assert result.exit_code == 0, result.stderr
    assert tree(tmp_path / "again") == tree(converted)


def test_convert_tells_what_it_did(models, tmp_path, invoke):
    result = invoke("convert", models / "one", "-o", tmp_path / "e", "--quant", "int8-wo", "--max-seq-len", 64)
    assert result.exit_code == 0, result.stderr
    assert "chosen: target cpu: --target cuda makes an engine for NVIDIA GPUs" in result.stderr
    assert "chosen: max_num_tokens 512" in result.stderr
    for text in ("Passes", "rms_norm", "Weights", f"{tmp_path / 'e'}: "):
        assert text in result.stdout


def test_converted_engine_answers(converted, invoke):
    words = ("run", converted, "-p", "the cat", "--max-tokens", 8, "--temperature", 0)
    told = json.loads(invoke(*words, "--json").stdout)
    assert told["output_tokens"] <= 8
    assert invoke(*words).stdout == told["text"] + "\n"
    chat = invoke(*words, "--chat")
    assert chat.exit_code == 0, chat.stderr


def test_converted_engine_can_be_inspected_and_measured(converted, invoke):
    assert "LlamaForCausalLM, from huggingface" in invoke("inspect", converted).stdout
    words = ("--input-len", 8, "--output-len", 4, "--num-iters", 2, "--num-iters-warmup", 1, "--threads", 1)
    result = invoke("bench", "latency", converted, *words)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[0])["model"] == "one"


def test_gguf_keeps_its_blocks_and_says_so(tmp_path, invoke):
    model = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", type_name="Q8_0")
    result = invoke("convert", model, "-o", tmp_path / "e")
    assert result.exit_code == 0, result.stderr
    assert "chosen: quant gguf: the file's own blocks, kept as they are" in result.stderr
    precision = open_engine(tmp_path / "e").manifest.precision
    assert precision.recipe == "gguf"
    assert precision.weights["Q8_0"] > precision.weights["float32"]
    assert invoke("run", tmp_path / "e", "-p", "the cat", "--max-tokens", 4).exit_code == 0


@pytest.mark.parametrize("text", ["x" * 128, "x" * 500])
def test_prompt_longer_than_the_engine(converted, invoke, text):
    result = invoke("run", converted, "-p", text)
    assert result.exit_code == 2
    assert f"error: the prompt has {len(text)} tokens, but the engine holds" in result.stderr


# --- models that are refused ------------------------------------------------------------------------------------------


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return edit


def change_config(**values: object) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **values}))

    return edit


def cut_first_weights(model: Path) -> None:
    path = min(model.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


REFUSED = {
    "no config": ("one", lambda m: (m / "config.json").unlink(), "is not a model directory: it has no config.json"),
    "config that is not JSON": ("one", lambda m: (m / "config.json").write_text("{"), "config.json is not valid JSON"),
    "no weights": ("one", lambda m: (m / "model.safetensors").unlink(), "no weights in 'model'"),
    "missing shard": (
        "sharded",
        lambda m: (m / "model-00002-of-00007.safetensors").unlink(),
        "missing shard: model-00002-of-00007.safetensors",
    ),
    "truncated weights": ("one", cut_first_weights, "model.safetensors is truncated: "),
    "truncated shard": ("sharded", cut_first_weights, "model-00001-of-00007.safetensors is truncated: "),
    "tensor missing": ("one", change_tensors(lambda t: t.pop(UP)), f"1 tensor(s) missing from the checkpoint: {UP}"),
    "tensor unused": (
        "one",
        change_tensors(lambda t: t.update({"model.surprise": torch.zeros(3)})),
        "1 tensor(s) of the checkpoint are unused by the model: model.surprise",
    ),
    "wrong shape": (
        "one",
        change_tensors(lambda t: t.update({UP: torch.zeros(3, 4)})),
        f"1 tensor(s) of the wrong shape: {UP}: checkpoint [3, 4], model [96, 64]",
    ),
    "unknown architecture": ("one", change_config(model_type="foo", architectures=["FooForCausalLM"]), "'foo'"),
    "unknown rope": (
        "one",
        change_config(rope_scaling={"rope_type": "odd", "factor": 2.0}, rope_parameters={"rope_type": "odd"}),
        "rope_type is 'odd'",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_bad_model(models, tmp_path, invoke, case):
    source, edit, message = REFUSED[case]
    shutil.copytree(models / source, tmp_path / "model")
    edit(tmp_path / "model")
    result = invoke("convert", tmp_path / "model", "-o", tmp_path / "e")
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("name", ["none", "none.gguf", "notes.txt", "empty.gguf"])
def test_what_is_no_model(tmp_path, invoke, name):
    if name in ("notes.txt", "empty.gguf"):
        (tmp_path / name).write_text("")
    result = invoke("convert", tmp_path / name, "-o", tmp_path / "e", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    error = json.loads(result.stderr.splitlines()[-1])["error"]
    assert error["kind"] == "ModelError"
    assert name in error["what"]
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "tensorrt", "--sm", "75"], "tensorrt does not build for SM 75"),
        (["--sm", "90"], "the cpu target is compiled for no GPU"),
        (["--target", "cuda", "--sm", "75"], "no kernels for SM 75"),
        (["--target", "cuda", "--sm", "ninety"], "'ninety' is no list of SMs"),
        (["--dtype", "float16"], "the cpu target does not compute in float16"),
        (["--quant", "int3"], "unknown quantization recipe 'int3'"),
        (["--quant", "gguf"], "the recipe 'gguf' keeps the blocks of a GGUF file, but one is not one"),
        (["--max-batch-size", "0"], "max_batch_size is 0"),
        (["--max-num-tokens", "3"], "max_num_tokens is 3, but max_batch_size is 16"),
        (["--max-seq-len", "513"], "max_seq_len is 513, but one was made for sequences of at most 512 tokens"),
    ],
)
def test_bad_option(models, tmp_path, invoke, words, message):
    result = invoke("convert", models / "one", "-o", tmp_path / "e", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {message}" in result.stderr
    assert "\n  next:  " in result.stderr
    assert os.listdir(tmp_path) == []


def test_existing_output(converted, models, tmp_path, invoke):
    shutil.copytree(converted, tmp_path / "e")
    result = invoke("convert", models / "one", "-o", tmp_path / "e")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: the output directory {tmp_path / 'e'} exists\n  where: --output\n"
        "  next:  --force replaces the engine in it\n"
    )
    assert tree(tmp_path / "e") == tree(converted)
    assert invoke("convert", models / "one", "-o", tmp_path / "e", "--force", "--max-seq-len", 64).exit_code == 0
    assert open_engine(tmp_path / "e", full_check=True).manifest.limits.max_seq_len == 64
    assert os.listdir(tmp_path) == ["e"]


# --- interrupted ------------------------------------------------------------------------------------------------------

KILLED_AT_COMMIT = """
import os, signal, sys
from llmbuild.cli.main import entry_point
from llmbuild.engine.writer import EngineWriter

def commit(self, **sections):
    assert any((self.directory / "weights").iterdir())
    os.kill(os.getpid(), signal.SIGKILL)

EngineWriter.commit = commit
sys.argv = ["llmbuild", "convert", *{words!r}]
entry_point()
"""

# The build is replaced by its last phase alone, so that the process starts without torch.
WAITS_WHILE_WRITING = """
import signal, sys, time
# A process that a shell starts in the background ignores this signal, and so do those that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
from llmbuild.builder import build
from llmbuild.cli.main import entry_point
from llmbuild.engine.writer import EngineWriter

def write_for_a_minute(config, *, progress):
    with EngineWriter(config.output) as writer:
        (writer.directory / "weights").write_bytes(bytes(1000))
        print("writing", file=sys.stderr, flush=True)
        time.sleep(60)

build.build = write_for_a_minute
sys.argv = ["llmbuild", "convert", *{words!r}]
entry_point()
"""


def start(code: str, *words: object) -> subprocess.Popen:
    listed = [str(word) for word in words]
    return subprocess.Popen([sys.executable, "-c", code.format(words=listed)], stderr=subprocess.PIPE, text=True)


def test_kill_9_leaves_the_path_absent(models, tmp_path, invoke):
    process = start(KILLED_AT_COMMIT, models / "one", "-o", tmp_path / "e")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "e").exists()
    assert len(os.listdir(tmp_path)) == 1  # the staging folder, which the next run removes
    assert invoke("convert", models / "one", "-o", tmp_path / "e").exit_code == 0
    assert os.listdir(tmp_path) == ["e"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stop_signals_leave_nothing(tmp_path, number, code):
    process = start(WAITS_WHILE_WRITING, tmp_path / "model", "-o", tmp_path / "made" / "e")
    assert process.stderr is not None
    assert process.stderr.readline() == "writing\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (code, "")
    assert os.listdir(tmp_path) == []


def test_really_full_disk(models, tmp_path, invoke):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = (models / "one" / "model.safetensors").stat().st_size + 16384  # the weights fit, the engine does not
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk is not permitted")
    try:
        result = invoke("convert", models / "one", "-o", disk / "e")
        assert result.exit_code == 2
        assert "error: the disk is full: the engine needs about " in result.stderr
        assert f"where: {disk}" in result.stderr
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
