from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmbuild.engine import staging, writer
from llmbuild.engine.reader import open_engine
from llmbuild.engine.writer import EngineWriter
from llmbuild.errors import ConfigError, EngineError
from support.fake_engine import PAYLOAD, sections, tree, write_engine, write_payload

TESTS = Path(__file__).parents[1]
NEW = {"plan/model.onnx": b"new"}


def test_commit_writes_payload_and_manifest(tmp_path):
    manifest = write_engine(tmp_path / "e")
    assert os.listdir(tmp_path) == ["e"]
    assert set(tree(tmp_path / "e")) == {*PAYLOAD, "engine.json", "engine.json.sha256"}
    assert [entry.path for entry in manifest.files] == sorted(PAYLOAD)


def test_two_writes_are_byte_identical(tmp_path):
    write_engine(tmp_path / "a")
    write_engine(tmp_path / "b", payload=dict(reversed(PAYLOAD.items())))
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_sha256sum_agrees_with_the_checksum_file(tmp_path):
    write_engine(tmp_path / "e")
    subprocess.run(["sha256sum", "--check", "--strict", "engine.json.sha256"], cwd=tmp_path / "e", check=True)


def test_leaving_without_commit_leaves_nothing(tmp_path):
    with EngineWriter(tmp_path / "deep" / "er" / "e") as engine_writer:
        write_payload(engine_writer.directory)
        assert engine_writer.directory.parent == tmp_path / "deep" / "er"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_any_exception_leaves_nothing(tmp_path, kind):
    with pytest.raises(kind), EngineWriter(tmp_path / "e") as engine_writer:
        write_payload(engine_writer.directory)
        raise kind("stop")
    assert os.listdir(tmp_path) == []


# --- what may be replaced -------------------------------------------------------------------------------------------


def test_existing_engine_needs_force(tmp_path):
    write_engine(tmp_path / "e")
    before = tree(tmp_path / "e")
    with pytest.raises(ConfigError) as error:
        write_engine(tmp_path / "e", payload=NEW)
    assert str(error.value) == (
        f"the output directory {tmp_path / 'e'} exists\n  where: --output\n  next:  --force replaces the engine in it"
    )
    assert tree(tmp_path / "e") == before
    assert os.listdir(tmp_path) == ["e"]


def test_force_replaces_the_whole_engine(tmp_path):
    write_engine(tmp_path / "e")
    write_engine(tmp_path / "e", payload=NEW, force=True)
    assert set(tree(tmp_path / "e")) == {"plan/model.onnx", "engine.json", "engine.json.sha256"}
    assert os.listdir(tmp_path) == ["e"]


def test_force_without_exchange_renames_aside(tmp_path, monkeypatch):
    write_engine(tmp_path / "e")
    monkeypatch.setattr(staging, "exchange", lambda first, second: False)
    write_engine(tmp_path / "e", payload=NEW, force=True)
    assert "plan/model.onnx" in tree(tmp_path / "e")
    assert "report.json" not in tree(tmp_path / "e")
    assert os.listdir(tmp_path) == ["e"]


def test_failed_force_keeps_the_old_engine(tmp_path):
    write_engine(tmp_path / "e")
    before = tree(tmp_path / "e")
    with pytest.raises(ZeroDivisionError), EngineWriter(tmp_path / "e", force=True):
        raise ZeroDivisionError
    assert tree(tmp_path / "e") == before
    assert os.listdir(tmp_path) == ["e"]


def test_empty_directory_is_taken(tmp_path):
    (tmp_path / "e").mkdir()
    write_engine(tmp_path / "e")
    assert open_engine(tmp_path / "e", full_check=True).manifest.model.name == "tiny"


@pytest.mark.parametrize("force", [False, True])
def test_other_data_is_never_replaced(tmp_path, force):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"exists and is not an engine \(it holds chapter.tex\)\n.*\n.*engines only"):
        write_engine(tmp_path / "thesis", force=force)
    assert tree(tmp_path / "thesis") == {"chapter.tex": b"x"}


def test_output_that_is_a_file(tmp_path):
    (tmp_path / "e").write_text("x")
    with pytest.raises(ConfigError, match=r"the output path .*/e is a file"):
        write_engine(tmp_path / "e", force=True)


def test_output_behind_a_symbolic_link(tmp_path):
    write_engine(tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    write_engine(tmp_path / "current", force=True, payload=NEW)
    assert (tmp_path / "current").is_symlink()
    assert "report.json" not in tree(tmp_path / "v1")


def test_engine_that_appears_meanwhile_is_kept(tmp_path):
    with pytest.raises(ConfigError, match="exists"), EngineWriter(tmp_path / "e") as engine_writer:
        write_payload(engine_writer.directory)
        write_engine(tmp_path / "e", payload=NEW)
        engine_writer.commit(**sections())
    assert "report.json" not in tree(tmp_path / "e")
    assert os.listdir(tmp_path) == ["e"]


# --- disk full and other refusals of the operating system -------------------------------------------------------------


def test_no_space_left_names_place_and_amount(tmp_path, monkeypatch):
    def full(path, on_chunk=None):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(writer, "sha256_file", full)
    with pytest.raises(EngineError) as error, EngineWriter(tmp_path / "e") as engine_writer:
        engine_writer.expect(7)
        write_payload(engine_writer.directory)
        engine_writer.commit(**sections())
    assert str(error.value) == (
        "the disk is full: the engine needs about 7 bytes, 5.2 kB had been written (No space left on device)\n"
        f"  where: {tmp_path}\n"
        "  next:  nothing was left behind; free some space or choose an --output on another disk"
    )
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_refused_before_writing(tmp_path):
    refused = pytest.raises(EngineError, match=r"not enough disk space: the engine needs about 9,000,000.0 GB, .* free")
    with refused, EngineWriter(tmp_path / "e") as engine_writer:
        engine_writer.expect(9 * 10**15)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path):
    """A 256 KiB filesystem of its own, where mounting is permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not permitted: {mounted.stderr.decode()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_really_full_disk(tiny_disk):
    with pytest.raises(EngineError, match=r"the disk is full: .* (MB|kB|bytes) had been written") as error:
        write_engine(tiny_disk / "e", payload={"weights/w": bytes(1 << 20)})
    assert error.value.where == str(tiny_disk)
    assert os.listdir(tiny_disk) == []


def test_really_full_disk_keeps_the_old_engine(tiny_disk):
    write_engine(tiny_disk / "e")
    before = tree(tiny_disk / "e")
    with pytest.raises(EngineError, match="the disk is full"):
        write_engine(tiny_disk / "e", payload={"weights/w": bytes(1 << 20)}, force=True)
    assert tree(tiny_disk / "e") == before
    assert os.listdir(tiny_disk) == ["e"]


def test_errors_about_other_files_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), EngineWriter(tmp_path / "e"):
        (tmp_path / "model.safetensors").read_bytes()


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(EngineError, match="cannot write the engine: Not a directory"):
        write_engine(tmp_path / "file" / "e")


# --- killed runs ------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.fake_engine import sections, write_payload
from llmbuild.engine import staging, writer
from llmbuild.engine.writer import EngineWriter

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

{arrange}
with EngineWriter(Path({out!r}), force=True) as engine_writer:
    write_payload(engine_writer.directory, {{"plan/model.onnx": b"new"}})
    engine_writer.commit(**sections())
"""

MOMENTS = {
    "while writing": "write_payload = die",
    "before hashing": "writer.sha256_file = die",
    "before the rename": "writer.publish = die",
    "after the exchange": "staging.shutil.rmtree = die",
    "before the first of two renames": "staging.exchange = lambda a, b: False; staging.os.rename = die",
    "between two renames": (
        "staging.exchange = lambda a, b: False; once = os.rename\n"
        "def rename(a, b):\n    once(a, b)\n    die()\n"
        "staging.os.rename = rename"
    ),
}


def run_killed(out: Path, moment: str) -> None:
    code = KILLED.format(tests=str(TESTS), arrange=MOMENTS[moment], out=str(out))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["while writing", "before hashing", "before the rename"])
def test_kill_leaves_the_path_absent_and_the_next_run_cleans_up(tmp_path, moment):
    run_killed(tmp_path / "e", moment)
    assert not (tmp_path / "e").exists()
    assert [name.rpartition("-")[0] for name in os.listdir(tmp_path)] == [".e.building"]
    write_engine(tmp_path / "e")
    assert os.listdir(tmp_path) == ["e"]


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_kill_during_force_leaves_an_old_or_a_new_whole_engine(tmp_path, moment):
    write_engine(tmp_path / "e")
    old = tree(tmp_path / "e")
    run_killed(tmp_path / "e", moment)
    if moment == "between two renames":  # the only moment without an engine at the path: the error tells the way back
        with pytest.raises(EngineError, match=r"interrupted --force left the former engine.*\.e\.replaced-"):
            open_engine(tmp_path / "e")
        with pytest.raises(ConfigError, match="exists"):
            write_engine(tmp_path / "e")  # puts the old engine back before anything else
    engine = open_engine(tmp_path / "e", full_check=True)
    assert tree(engine.path) == old or "report.json" not in tree(engine.path)
    write_engine(tmp_path / "e", force=True)
    assert os.listdir(tmp_path) == ["e"]


def test_a_live_convert_is_not_a_leftover(tmp_path):
    with EngineWriter(tmp_path / "e") as first:
        write_payload(first.directory)
        with EngineWriter(tmp_path / "e") as second:
            assert first.directory != second.directory
            assert first.directory.exists()
        first.commit(**sections())
    open_engine(tmp_path / "e", full_check=True)
    assert os.listdir(tmp_path) == ["e"]


def test_neighbours_with_similar_names_are_kept(tmp_path):
    for name in (".e.building-x", ".e2.building-7", "e.building-7"):
        (tmp_path / name).mkdir()
    write_engine(tmp_path / "e")
    assert sorted(os.listdir(tmp_path)) == [".e.building-x", ".e2.building-7", "e", "e.building-7"]


def test_a_target_may_not_write_links(tmp_path):
    with pytest.raises(AssertionError, match="a target wrote 'plan/link'"), EngineWriter(tmp_path / "e") as w:
        (w.directory / "plan").mkdir()
        (w.directory / "plan" / "link").symlink_to("/etc/hostname")
        w.commit(**sections())
