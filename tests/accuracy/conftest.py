"""The command line in this process, and a tiny Llama to convert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.tiny_models import save_tiny, tiny_model


@pytest.fixture
def invoke(monkeypatch) -> Callable[..., Any]:
    """Return `invoke(*words)`: runs the command line, returns exit_code, stdout and stderr."""
    from llmbuild.cli.main import app

    monkeypatch.delenv("LLMBUILD_DEBUG", raising=False)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return save_tiny(tiny_model("llama"), tmp_path_factory.mktemp("models") / "llama")
