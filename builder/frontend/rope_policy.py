"""Rotary scalings whose frequencies depend on how long a sequence has become: settled at build time, and stated.

transformers computes them anew as a sequence grows, from all positions of the batch at once. A paged engine cannot:
keys that are cached keep the frequencies they were made with. So an engine has one set of frequencies:

    dynamic    up to max_position_embeddings nothing is scaled, and the engine ends there: exact
    longrope   up to original_max_position_embeddings the short factors hold; an engine that ends there is exact, and
               that is the default. With a larger --max-seq-len all sequences use the long factors, which is what
               transformers does for sequences that are longer than the original limit, and only for those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig

PINNED = "pinned"  # a rope type that transformers recomputes nothing for


def rope_dicts(config: PretrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """All rope dicts of the config with their paths: one for the model, or one per layer type."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, key, None)
        if not isinstance(rope, dict):
            continue
        nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
        found += [(f"{key}.{name}", value) for name, value in nested.items()] if nested else [(key, rope)]
    return found


def rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def settle(config: PretrainedConfig, max_seq_len: int | None) -> tuple[int | None, list[str]]:
    """Choose the frequencies for engines of at most `max_seq_len` tokens, in `config`, in place.

    Returns:
        The length that the choice ends at, or None where it ends nowhere; what was chosen, in words.
    """
    longest: int | None = None
    notes = []
    for path, rope in rope_dicts(config):
        if rope_type(rope) == "dynamic":
            longest = config.max_position_embeddings
            notes.append(f"{path}: dynamic scaling begins after {longest} tokens, where the engine ends")
        elif rope_type(rope) == "longrope":
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            if max_seq_len is None or max_seq_len <= original:
                longest = original
                notes.append(
                    f"{path}: short factors, exact up to {original} tokens; a larger --max-seq-len takes the long ones"
                )
            else:
                rope["short_factor"] = rope["long_factor"]
                notes.append(
                    f"{path}: long factors for all sequences; those of at most {original} tokens differ from "
                    "transformers, which takes the short factors there"
                )
    return longest, list(dict.fromkeys(notes))


@contextlib.contextmanager
def pinned(model: nn.Module) -> Iterator[None]:
    """Let no rotary embedding of the model recompute its frequencies."""
    held = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and changes(kind):
            held.append((module, kind))
            module.rope_type = PINNED  # type: ignore[assignment]
        elif isinstance(kind, dict) and any(changes(each) for each in kind.values()):
            held.append((module, kind))  # type: ignore[arg-type]
            module.rope_type = {name: PINNED if changes(each) else each for name, each in kind.items()}  # type: ignore
    try:
        yield
    finally:
        for module, kind in held:
            module.rope_type = kind  # type: ignore[assignment]


def changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"
