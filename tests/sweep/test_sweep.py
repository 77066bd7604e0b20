"""Every decoder family of transformers without recurrent state: traced, fused, and token-exact on the cpu target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from llmbuild.builder.frontend.fake_model import build_fake_model
from llmbuild.builder.frontend.trace import trace
from llmbuild.errors import UnsupportedError
from support.sweep import REFUSED, SWEEP, run

# Families of the default run: one for each way in which attention, positions, norms, experts and layouts differ.
QUICK = {
    "llama",
    "gemma2",
    "gpt2",
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


@pytest.mark.parametrize("family", REFUSED)
def test_the_rest_is_refused_by_name(family: str) -> None:
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=64)
    config = AutoConfig.for_model(family, **sizes)
    with pytest.raises(UnsupportedError) as caught:
        trace(build_fake_model(config, torch.float32))
    assert len(caught.value.what) > 10 and "TypeError" not in caught.value.what
