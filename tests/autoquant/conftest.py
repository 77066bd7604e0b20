"""A tiny Llama of which one layer is hard to round, and the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from support.tiny_models import save_tiny, tiny_model

HARD = "model.layers.0.mlp.down_proj"


@pytest.fixture
def invoke(monkeypatch) -> Callable[..., Any]:
    """Return `invoke(*words)`: runs the command line, returns exit_code, stdout and stderr."""
    from llmbuild.cli.main import app

    monkeypatch.delenv("LLMBUILD_DEBUG", raising=False)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="session")
def outliers(tmp_path_factory) -> Path:
    """One weight of every group of 32 of the hard layer is 40 times as large: the others round to few levels."""
    model = tiny_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.get_submodule(HARD).weight[:, ::32] *= 40.0
        model.get_submodule("model.layers.0.mlp.up_proj").weight[::32] /= 40.0  # what it makes stays as it was
    return save_tiny(model, tmp_path_factory.mktemp("models") / "outliers")
