from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmbuild.engine.manifest import FileEntry, TargetSection
from llmbuild.engine.reader import open_engine
from llmbuild.engine.verify import verify
from llmbuild.errors import EngineError
from support.fake_engine import PAYLOAD, sections, tree, write_engine

ALL_FILES = [*PAYLOAD, "engine.json", "engine.json.sha256"]


@pytest.fixture
def engine(tmp_path) -> Path:
    write_engine(tmp_path / "e")
    return tmp_path / "e"


def rewrite_manifest(engine: Path, change: Any) -> None:
    """Change the manifest's data and give it a matching checksum, as another writer could."""
    data = json.loads((engine / "engine.json").read_text())
    change(data)
    set_manifest(engine, json.dumps(data).encode())


def set_manifest(engine: Path, raw: bytes) -> None:
    (engine / "engine.json").write_bytes(raw)
    (engine / "engine.json.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  engine.json\n")


def refusal(engine: Path, **options: Any) -> str:
    with pytest.raises(EngineError) as error:
        open_engine(engine, **options)
    return str(error.value)


def test_open(engine):
    opened = open_engine(engine, full_check=True)
    assert opened.manifest.limits.max_seq_len == 64
    assert opened.file("plan/model.onnx").read_bytes() == PAYLOAD["plan/model.onnx"]
    assert opened.files_below("tokenizer") == [engine / "tokenizer" / "tokenizer.json"]
    assert opened.unlisted == ()
    assert verify(engine) == []


def test_file_that_is_not_listed(engine):
    (engine / "plan" / "other").write_text("x")
    opened = open_engine(engine)
    assert opened.unlisted == ("plan/other",)
    with pytest.raises(EngineError, match="the engine does not hold 'plan/other'"):
        opened.file("plan/other")


# --- not an engine ----------------------------------------------------------------------------------------------------


def test_no_such_directory(tmp_path):
    assert refusal(tmp_path / "x") == (
        f"no engine at {tmp_path / 'x'}\n  next:  give the directory that `llmbuild convert MODEL -o ENGINE` wrote"
    )


def test_a_model_is_not_an_engine(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path) == (
        f"{tmp_path} is a model, not an engine\n"
        f"  next:  llmbuild convert {tmp_path} -o ENGINE makes an engine from a model"
    )


def test_gguf_file_is_not_an_engine(tmp_path):
    (tmp_path / "m.gguf").write_text("")
    assert "m.gguf is a file, not an engine directory" in refusal(tmp_path / "m.gguf")


def test_other_directory(tmp_path):
    assert "is not an engine: it holds no engine.json" in refusal(tmp_path)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_FILES)
def test_flipped_byte_in_each_file_is_found_and_named(engine, name):
    path = engine / name
    content = bytearray(path.read_bytes())
    for position in {0, len(content) // 2, len(content) - 1}:
        changed = content.copy()
        changed[position] ^= 1
        path.write_bytes(changed)
        problems = verify(engine)
        assert len(problems) == 1
        # One flipped digit of the checksum cannot be told from a changed manifest: the message names both.
        assert name == problems[0].path or (name == "engine.json.sha256" and name in problems[0].what)
        assert name in refusal(engine, full_check=True)


def test_what_is_executed_is_hashed_at_every_load(engine):
    plan, weights = engine / "plan/model.onnx", engine / "weights/model.safetensors"
    for path in (weights, plan):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        if path is weights:
            open_engine(engine, requirements=False)  # gigabytes: left to `verify`
    assert "plan/model.onnx: content changed: sha256" in refusal(engine)


@pytest.mark.parametrize("name", ALL_FILES)
def test_missing_file_is_named_at_load(engine, name):
    (engine / name).unlink()
    message = refusal(engine)
    if name == "engine.json":
        assert "is not an engine: it holds no engine.json" in message
    else:
        assert re.search(rf"{re.escape(name)}(: missing \(expected \d+ bytes\)| is missing)", message)
        assert verify(engine)[0].path == name


@pytest.mark.parametrize("name", list(PAYLOAD))
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_size_is_named_at_load(engine, name, change):
    size = len(PAYLOAD[name])
    (engine / name).write_bytes((PAYLOAD[name] + b"x")[: size + change])
    verb = "truncated" if change < 0 else "too long"
    assert refusal(engine) == (
        f"the engine is damaged: {name}: {verb}: {size + change} bytes, expected {size}\n  where: {engine / name}\n"
        "  next:  convert the model again with --force, or restore the file from a good copy"
    )


def test_verify_reports_everything_at_once(engine):
    (engine / "report.json").unlink()
    (engine / "plan" / "model.onnx").write_bytes(b"short")
    (engine / "tokenizer" / "tokenizer.json").write_bytes(PAYLOAD["tokenizer/tokenizer.json"].upper())
    (engine / "weights" / "extra").write_text("x")
    assert [str(problem).split(" (")[0].split(" sha256")[0] for problem in verify(engine)] == [
        "plan/model.onnx: truncated: 5 bytes, expected 35",
        "report.json: missing",
        "tokenizer/tokenizer.json: content changed:",
        "weights/extra: is not part of the engine",
    ]
    assert "(and 2 more; `llmbuild verify` lists them)" in refusal(engine, full_check=True)


def test_changed_manifest(engine):
    raw = (engine / "engine.json").read_bytes()
    changed = raw.replace(b'"max_seq_len": 64', b'"max_seq_len": 99')
    (engine / "engine.json").write_bytes(changed)
    assert refusal(engine) == (
        f"engine.json is not what engine.json.sha256 says: sha256 {hashlib.sha256(changed).hexdigest()}, "
        f"expected {hashlib.sha256(raw).hexdigest()}\n  where: {engine / 'engine.json'}\n"
        "  next:  one of the two files was changed after the build; convert the model again with --force, or restore "
        "the file from a good copy"
    )


# --- another version, broken manifests --------------------------------------------------------------------------------


def test_newer_format_version(engine):
    rewrite_manifest(engine, lambda data: data.update(format_version=2, new_field=1))
    assert refusal(engine) == (
        f"the engine has format version 2; this llmbuild reads version 1\n  where: {engine / 'engine.json'}\n"
        "  next:  upgrade llmbuild, or convert the model again with this one"
    )
    assert verify(engine)[0].what == "the engine has format version 2; this llmbuild reads version 1"


@pytest.mark.parametrize("version", [None, "1", True, [1], 1.5])
def test_format_version_that_is_no_number(engine, version):
    rewrite_manifest(engine, lambda data: data.update(format_version=version))
    assert "states no format version" in refusal(engine)


def test_newer_version_without_checksum_file_is_still_told(engine):
    rewrite_manifest(engine, lambda data: data.update(format_version=7))
    (engine / "engine.json.sha256").unlink()
    assert "format version 7" in refusal(engine)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"nonsense"])
def test_manifest_that_is_not_json(engine, raw):
    set_manifest(engine, raw)
    assert "engine.json is not valid JSON" in refusal(engine)


def test_manifest_that_is_not_an_object(engine):
    set_manifest(engine, b"[1]")
    assert "engine.json is not a JSON object" in refusal(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["limits"].pop("max_seq_len"), "limits.max_seq_len: Field required"),
        (lambda d: d["limits"].update(max_seq_len="64"), "limits.max_seq_len: Input should be a valid integer"),
        (lambda d: d["limits"].update(max_batch_size=0), "limits.max_batch_size: Input should be greater than"),
        (lambda d: d.update(surprise=1), "surprise: Extra inputs are not permitted"),
        (lambda d: d["files"].append(d["files"][0]), "files: Value error, listed twice: plan/model.onnx"),
    ],
)
def test_manifest_with_a_wrong_field(engine, change, message):
    rewrite_manifest(engine, change)
    assert f"engine.json does not follow format version 1: {message}" in refusal(engine)


# --- paths that leave the directory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../e2/file", "/etc/hostname", "plan/../../x", "a\\b", "./plan/model.onnx", "a//b"])
def test_listed_path_that_leaves_the_engine(engine, path):
    rewrite_manifest(engine, lambda data: data["files"][0].update(path=path))
    message = refusal(engine)
    assert "files.0.path: Value error, path " in message
    assert repr(path) in message


def test_symbolic_link_in_place_of_a_file(engine, tmp_path):
    target = engine / "plan" / "model.onnx"
    target.rename(tmp_path / "elsewhere")
    target.symlink_to(tmp_path / "elsewhere")
    assert "plan/model.onnx: is reached through a symbolic link to" in refusal(engine)
    assert [problem.path for problem in verify(engine)] == ["plan/model.onnx"]


def test_symbolic_link_in_place_of_a_folder(engine, tmp_path):
    (engine / "weights").rename(tmp_path / "weights")
    (engine / "weights").symlink_to(tmp_path / "weights")
    assert "weights/model.safetensors: is reached through a symbolic link to" in refusal(engine)
    assert {problem.path for problem in verify(engine)} == {"weights/model.safetensors", "weights"}


def test_symbolic_link_in_place_of_the_manifest(engine, tmp_path):
    (engine / "engine.json").rename(tmp_path / "m.json")
    (engine / "engine.json").symlink_to(tmp_path / "m.json")
    assert "engine.json is a symbolic link" in refusal(engine)


def test_engine_reached_through_a_symbolic_link_is_fine(engine, tmp_path):
    (tmp_path / "current").symlink_to(engine)
    assert open_engine(tmp_path / "current", full_check=True).manifest.model.name == "tiny"


def test_folder_in_place_of_a_file(engine):
    (engine / "report.json").unlink()
    (engine / "report.json").mkdir()
    assert "report.json: is not a regular file" in refusal(engine)


# --- packages ---------------------------------------------------------------------------------------------------------


def with_requires(**requires: str) -> dict[str, Any]:
    target = sections()["target"]
    return {"target": TargetSection(**{**target.model_dump(), "requires": requires})}


def test_package_outside_the_range(tmp_path):
    write_engine(tmp_path / "e", **with_requires(numpy=">=1000,<2000"))
    import numpy

    assert refusal(tmp_path / "e") == (
        f"this engine needs numpy>=1000,<2000 ({numpy.__version__} installed)\n"
        "  where: engine.json: target.requires\n"
        '  next:  pip install "numpy>=1000,<2000", or convert the model again with the packages installed here'
    )
    assert open_engine(tmp_path / "e", requirements=False).manifest.target.requires == {"numpy": ">=1000,<2000"}
    assert verify(tmp_path / "e") == []


def test_package_that_is_missing(tmp_path):
    write_engine(tmp_path / "e", **with_requires(no_such_package_here="==1"))
    assert "this engine needs no_such_package_here==1 (not installed)" in refusal(tmp_path / "e")


def test_version_range_that_cannot_be_read(tmp_path):
    write_engine(tmp_path / "e", **with_requires(numpy="about two"))
    assert "the engine's version range 'about two' of numpy cannot be read" in refusal(tmp_path / "e")


def test_opening_changes_nothing(engine):
    before = tree(engine)
    open_engine(engine, full_check=True)
    verify(engine)
    assert tree(engine) == before


def test_entry_refuses_what_is_no_hash():
    with pytest.raises(ValueError, match="sha256"):
        FileEntry(path="a", size=1, sha256="00")
