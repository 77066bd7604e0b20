from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from llmbuild.cli.errors import reporting
from llmbuild.errors import EngineError, LLMBuildError


def run_raising(error: BaseException, *, as_json: bool = False):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        with reporting(as_json=as_json):
            raise error

    return CliRunner().invoke(app, [])


@pytest.fixture(autouse=True)
def no_debug(monkeypatch):
    monkeypatch.delenv("LLMBUILD_DEBUG", raising=False)


def test_user_error_is_exit_2_and_no_traceback():
    result = run_raising(EngineError("it is damaged", where="a/b", hint="copy it again"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: it is damaged\n  where: a/b\n  next:  copy it again\n"


def test_user_error_as_json_is_on_stderr():
    result = run_raising(EngineError("it is damaged", where="a/b", hint="copy it"), as_json=True)
    assert (result.exit_code, result.stdout) == (2, "")
    assert json.loads(result.stderr) == {
        "error": {"kind": "EngineError", "what": "it is damaged", "where": "a/b", "next": "copy it"}
    }


def test_our_own_fault_is_exit_1():
    result = run_raising(LLMBuildError("lint failed after pass rope"))
    assert (result.exit_code, result.stderr) == (1, "error: lint failed after pass rope\n")


def test_defect_keeps_its_traceback():
    result = run_raising(ZeroDivisionError("x"))
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_file_that_cannot_be_read():
    result = run_raising(PermissionError(13, "Permission denied", "/m/config.json"))
    assert result.exit_code == 2
    assert result.stderr == (
        "error: cannot access a file: Permission denied\n  where: /m/config.json\n"
        "  next:  check the path and its permissions\n"
    )


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("LLMBUILD_DEBUG", "1")
    result = run_raising(EngineError("it is damaged"))
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert "error: it is damaged" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert"], "Missing argument"),
        (["convert", "m"], "no engine directory is given"),
        (["convert", "m", "-o", "e", "--max-seq-len", "many"], "'--max-seq-len'"),
        (["run", "e"], "Missing option"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["verify", "e", "--fast"], "No such option"),
        (["bench", "latency", "e", "--num-iters", "0"], "'--num-iters'"),
    ],
)
def test_usage_errors_are_exit_2(invoke, words, message):
    result = invoke(*words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_debug_option_and_exit_code_of_the_real_command(tmp_path):
    command = [sys.executable, "-m", "llmbuild"]
    done = subprocess.run([*command, "verify", tmp_path / "none"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: no engine at {tmp_path / 'none'}\n")
    done = subprocess.run([*command, "--debug", "verify", tmp_path / "none"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
