"""One family from config to tokens: traced, fused, built, served, compared with transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmbuild import BuildConfig, build
from llmbuild.errors import UnsupportedError
from support.staggered import generate, logits_after, serve
from support.tiny_models import FAMILIES, MOE_FAMILIES, VOCAB_SIZE, save_tiny, tiny_model

# Layouts and scalings that one config of a family does not cover: name -> (family, what replaces its tiny defaults).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon (grouped)": ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon (ALiBi)": ("falcon", dict(multi_query=False, alibi=True, bias=True, parallel_attn=False)),
    "llama (dynamic rope)": (
        "llama",
        dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
    ),
    "phi3 (longrope)": (
        "phi3",
        dict(
            original_max_position_embeddings=256,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                short_factor=[1.0 + 0.1 * i for i in range(8)],
                long_factor=[2.0 + 0.5 * i for i in range(8)],
                original_max_position_embeddings=256,
            ),
        ),
    ),
}
# How many families that is: layouts of one family count once.
FAMILY_COUNT = len({**FAMILIES, **MOE_FAMILIES})
SWEEP = (*FAMILIES, *MOE_FAMILIES, *VARIANTS)
PROMPT_LENGTHS = (1, 7, 16, 41)  # one token; across the window of 6; a whole block; across chunks of 24 and blocks
MAX_TOKENS = 12


@dataclass(frozen=True)
class Outcome:
    """error: largest logit difference relative to the largest logit. exact: all greedy tokens are equal.

    fused: how often each pass fired. declined: why passes did not fire, one line each. nodes: traced and optimised.
    refused: why the family was refused; the other fields then mean nothing.
    """

    error: float = 0.0
    exact: bool = False
    fused: dict[str, int] | None = None
    declined: tuple[str, ...] = ()
    nodes: tuple[int, int] = (0, 0)
    refused: str | None = None


def run(name: str, directory: Path, **options_of_build: Any) -> Outcome:
    """Take one entry of SWEEP through everything. Files go below `directory`.

    options_of_build: of BuildConfig, for another target than cpu.
    """
    family, options = VARIANTS.get(name, (name, {}))
    model = tiny_model(family, **options)
    save_tiny(model, directory / "model")
    config = BuildConfig(
        model=directory / "model",
        output=directory / "engine",
        max_batch_size=4,
        max_num_tokens=24,
        max_seq_len=128,
        **options_of_build,
    )
    try:
        report = build(config)
    except UnsupportedError as error:
        return Outcome(refused=error.what)
    prompts = sweep_prompts()
    served = serve(directory / "engine", prompts, MAX_TOKENS, kv_cache_blocks=64)
    exact = all(t == generate(model, p, MAX_TOKENS) for p, t in zip(prompts, served.tokens, strict=True))
    alone = serve(directory / "engine", prompts[-1:], MAX_TOKENS, kv_cache_blocks=64)
    expected = logits_after(model, prompts[-1] + alone.tokens[0])
    error = max(
        float((torch.from_numpy(logits[-1]) - expected[positions[-1]]).abs().max() / expected.abs().max())
        for positions, logits in alone.logits
        if len(logits)
    )
    described = json.loads((directory / "engine" / "report.json").read_text())
    fused: dict[str, int] = {}
    for rewrite in report.rewrites:
        fused[rewrite.name] = fused.get(rewrite.name, 0) + rewrite.count
    nodes = described["graph_nodes"]
    declined = tuple(reason for rewrite in report.rewrites for reason in rewrite.declined)
    return Outcome(error, exact, fused, declined, (nodes["traced"], nodes["optimized"]))


def sweep_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
