"""Engines of the cuda target that multiply 8-bit integers, on a GPU, against the oracle.

tests/targets/test_cuda_int8.py runs the same plans without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.gpu_engines import against_oracle, gpu_sm, row_errors
from support.packed_driver import Request
from support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

# Of the median row. float32: sums of integers are exact. bfloat16: its own rounding, and levels that fall otherwise (an
# H200 shows 0.03 to 0.08; Mixtral, whose router then takes other experts, up to 0.20).
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.15}
ROUTED = 2.0  # how much larger they may be where experts are chosen


@pytest.fixture(scope="session")
def sm() -> str:
    return gpu_sm()


def requests() -> list[Request]:
    """Products of one row, of few and of many: chunks of 70, decode, and a prompt of one token that joins."""
    draw = np.random.default_rng(7).integers(3, 250, 110).tolist()
    return [Request(draw[:90], prompt=80, chunks=(70,)), Request(draw[90:], prompt=1, arrives=3)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("recipe", ["int8", "int8-sq", "int8-sq-static"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_logits_are_those_of_the_oracle(family: str, recipe: str, dtype: str, sm: str, tmp_path: Path) -> None:
    found, expected = against_oracle(
        tiny_model(family),
        requests,
        tmp_path,
        calibrated=recipe != "int8",
        sm=sm,
        dtype=dtype,
        quant=recipe,
        max_num_tokens=128,
    )
    errors = row_errors(found, expected)
    print(f"{family} {recipe} {dtype}: median {np.median(errors):.1e}, most {errors.max():.1e}")
    assert np.median(errors) < TOLERANCES[dtype] * (ROUTED if family == "mixtral" else 1.0)
