"""Every decoder family planned for the cuda target and run in the interpreter: the logits are transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmbuild.errors import UnsupportedError
from support.packed_driver import Request, drive
from support.plans import tiny_executor
from support.sweep import SWEEP, VARIANTS
from support.tiny_models import VOCAB_SIZE, tiny_model
from support.traced import optimized

QUICK = {"llama", "gemma2", "falcon (ALiBi)", "minicpm3", "gpt_oss"}
HALF = ("llama", "bloom")
# A tolerance for float16: its rounding, some layers deep, of logits that are sums of 64 products.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}


def requests() -> list[Request]:
    """Chunks across blocks of 8 and a window of 6, decode, and a prompt of one token that joins it."""
    draw = np.random.default_rng(7).integers(3, VOCAB_SIZE, 24).tolist()
    return [Request(draw[:14], prompt=11, chunks=(5,)), Request(draw[14:18], prompt=1, arrives=2)]


def planned_logits(name: str, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits that steps ask for (of each chunk's last token), by the plan and by transformers in float32.

    So a step has fewer rows of logits than tokens, and the kernels of either are told apart.
    """
    family, options = VARIANTS.get(name, (name, {}))
    model = tiny_model(family, **options)
    executor = tiny_executor(optimized(family, dtype=dtype, **options), num_blocks=8)
    found = np.concatenate(drive(executor.forward, requests(), num_blocks=8, all_rows=False))
    with torch.inference_mode():
        expected = [model(torch.tensor([request.tokens])).logits[0] for request in requests()]
    asked = ~np.isnan(found).any(axis=1)
    assert asked.sum() == 9  # the ends of two chunks and of a prompt of one token, and six tokens after them
    return found[asked], torch.cat(expected).float().numpy()[asked]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SWEEP],
)
def test_plan_of_family(name: str) -> None:
    found, expected = planned_logits(name, torch.float32)
    assert np.abs(found - expected).max() < TOLERANCES[torch.float32] * np.abs(expected).max()


@pytest.mark.parametrize("name", HALF)
def test_plan_of_family_in_float16(name: str) -> None:
    found, expected = planned_logits(name, torch.float16)
    assert np.abs(found - expected).max() < TOLERANCES[torch.float16] * np.abs(expected).max()


def test_rows_that_no_row_program_can_reach_are_refused_by_name() -> None:
    """Two experts a token: Llama 4's products over all tokens stay as they are, [E, T, H] seen as [E·T, H]."""
    program = optimized("llama4_text", num_experts_per_tok=2)
    with pytest.raises(UnsupportedError, match="rows that are not the first axis"):
        tiny_executor(program)
