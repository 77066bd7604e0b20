"""Engines of the cuda target on a GPU, and what the oracle computes for the same requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from llmbuild import BuildConfig, build
from llmbuild.builder.calibration import Calibration
from llmbuild.builder.frontend.load import load_program
from llmbuild.builder.options import choose
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.pipeline import optimize
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.runtime.loading import load_engine
from support.packed_driver import Request, drive
from support.tiny_models import save_tiny

TEXT = "Forty winks, and then the rain came down on the roof of the old mill. " * 8


def gpu_sm() -> str:
    """The compute capability of the GPU, as `--sm` takes it."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def against_oracle(
    model: PreTrainedModel,
    requests: Callable[[], list[Request]],
    folder: Path,
    *,
    calibrated: bool,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits that are asked for, of an engine on the GPU and of the oracle in float32, rounded alike.

    options: of the build. calibrated: on TEXT.
    """
    (folder / "text.txt").write_text(TEXT)
    text: dict[str, Any] = {"calibration_text": folder / "text.txt", "calibration_tokens": 300}
    config = BuildConfig(
        model=save_tiny(model, folder / "model"),
        output=folder / "engine",
        target="cuda",
        max_batch_size=4,
        max_seq_len=128,
        **(text if calibrated else {}),
        **options,
    )
    program = load_program(config.model, dtype=torch.float32)
    optimize(program, choose(config).recipe, calibrate=Calibration(config))
    oracle, state = Oracle(program), PagedState(num_blocks=16, block_size=16)
    arguments: dict[str, Any] = {"num_blocks": 16, "block_size": 16, "all_rows": False}
    expected = np.concatenate(drive(lambda step: oracle.run(step, state).numpy(), requests(), **arguments))
    engine = load_engine(build(config).output, kv_cache_blocks=16)
    found = np.concatenate(drive(engine.executor.forward, requests(), **arguments))
    engine.executor.close()
    asked = ~np.isnan(expected).any(axis=1)
    assert np.isfinite(found[asked]).all()
    return found[asked], expected[asked]


def row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The largest error of each row, as a share of the largest logit of all."""
    return np.abs(found - expected).max(axis=1) / np.abs(expected).max()
