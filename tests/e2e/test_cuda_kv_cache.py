"""Engines of the cuda target with a KV cache in 8 bits on a GPU, against the oracle with the same rounding.

tests/targets/test_cuda_kv_cache.py runs the same plans without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.gpu_engines import against_oracle, gpu_sm, row_errors
from support.packed_driver import Request
from support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

# float32: a number between two steps of 8 bits may be rounded to either (an H200 shows 1e-6). bfloat16: the rounding of
# everything else, and with it many more of these numbers: steps are 6% in fp8 (0.05 to 0.16) and 1% in int8 (0.02).
TOLERANCES = {
    ("fp8", "float32"): 5e-3,
    ("int8", "float32"): 5e-3,
    ("fp8", "bfloat16"): 0.25,
    ("int8", "bfloat16"): 5e-2,
}


@pytest.fixture(scope="session")
def sm() -> str:
    return gpu_sm()


def requests() -> list[Request]:
    """Chunks, decode across blocks and the window, and a prompt of one token that joins."""
    draw = np.random.default_rng(7).integers(3, 250, 60).tolist()
    return [Request(draw[:40], prompt=30, chunks=(13,)), Request(draw[40:], prompt=1, arrives=2)]


@pytest.mark.parametrize(("cache", "dtype"), TOLERANCES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "minicpm3"])
def test_logits_are_those_of_the_oracle(family: str, cache: str, dtype: str, sm: str, tmp_path: Path) -> None:
    found, expected = against_oracle(
        tiny_model(family),
        requests,
        tmp_path,
        calibrated=cache == "fp8",
        sm=sm,
        dtype=dtype,
        kv_cache_dtype=cache,
        max_num_tokens=32,
    )
    error = row_errors(found, expected).max()
    print(f"{family} {cache} {dtype}: {error:.1e}")
    assert error < TOLERANCES[cache, dtype]
