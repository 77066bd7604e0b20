"""Every decoder family of transformers without recurrent state: traced, fused, and token-exact on the cpu target."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sweep import FAMILY_COUNT, SWEEP, run

# Families of the default run: one for each way in which attention, positions, norms, experts and layouts differ. Llama,
# Gemma 2 and GPT-2 go the same way in tests/e2e/test_tiny_parity.py.
QUICK = {
    "gptj",
    "opt",
    "cohere",
    "minicpm3",
    "falcon",
    "falcon (grouped)",
    "falcon (ALiBi)",
    "bloom",
    "mpt",
    "gpt_neo",
    "xglm",
    "gemma4_text",
    "nanochat",
    "phi3 (longrope)",
    "llama (dynamic rope)",
    "mixtral",
    "deepseek_v3",
    "llama4_text",
}
NO_ROPE = {
    "gpt2",
    "gpt_bigcode",
    "opt",
    "biogpt",
    "falcon (ALiBi)",
    "bloom",
    "mpt",
    "gpt_neo",
    "xglm",
    "openai-gpt",
    "ctrl",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SWEEP]
)
def test_family(name: str, tmp_path: Path) -> None:
    outcome = run(name, tmp_path)
    assert outcome.refused is None
    assert outcome.exact
    assert outcome.error < 1e-4
    assert outcome.fused is not None
    ropes = outcome.fused["rope"]
    assert (ropes == 0) if name in NO_ROPE else (ropes >= 2)


def test_at_least_64_families() -> None:
    assert FAMILY_COUNT >= 64
