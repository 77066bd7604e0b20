"""The command line in this process, and an engine of a fake model with a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llmbuild.engine.manifest import LimitsSection
from llmbuild.runtime.executors import registry
from support.fake_engine import PAYLOAD, sections, write_engine
from support.tiny_models import BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, VOCAB_SIZE, byte_level_tokenizer

REPORT = {
    "report_version": 1,
    "graph_nodes": {"traced": 90, "optimized": 40},
    "passes": [{"name": "x*rsqrt(mean(x²)+eps)*w ⇒ rms_norm", "count": 3, "declined": ["a", "b", "a"]}],
    "weight_bytes": {"float32": 5120},
}


@pytest.fixture
def invoke(monkeypatch) -> Callable[..., Any]:
    """Return `invoke(*words, input=None)`: runs the command line, returns exit_code, stdout and stderr."""
    from llmbuild.cli.main import app

    monkeypatch.delenv("LLMBUILD_DEBUG", raising=False)
    return lambda *words, **options: CliRunner().invoke(app, [str(word) for word in words], **options)


def _write_fake_engine(out: Path, *, chat_template: bool = True) -> Path:
    """Write an engine whose executor is `support.fake_executor`."""
    payload = {
        **PAYLOAD,
        "report.json": json.dumps(REPORT).encode(),
        "tokenizer/tokenizer.json": byte_level_tokenizer().to_str().encode(),
        "tokenizer/tokenizer_config.json": json.dumps({"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}).encode(),
        "tokenizer/generation_config.json": b'{"temperature": 0.5}',
    }
    if chat_template:
        payload["tokenizer/chat_template.jinja"] = CHAT_TEMPLATE.encode()
    model = sections()["model"].model_copy(update={"vocab_size": VOCAB_SIZE})
    limits = LimitsSection(max_batch_size=4, max_num_tokens=16, max_seq_len=64)
    write_engine(out, payload=payload, model=model, limits=limits)
    return out


@pytest.fixture
def engine(tmp_path, monkeypatch) -> Path:
    monkeypatch.setitem(registry.EXECUTORS, "cpu", "support.fake_executor:executor_of")
    return _write_fake_engine(tmp_path / "e")


@pytest.fixture
def write_fake_engine() -> Callable[..., Path]:
    return _write_fake_engine
