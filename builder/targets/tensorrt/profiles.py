"""Optimization profiles of an engine, from the limits it is built for.

tensorrt-rtx:

    profile 0   prompts     1 .. prefill_batch sequences of 1 .. max_num_tokens tokens
    profile 1   decode      1 .. max_batch_size sequences of one token

tensorrt, whose steps are packed:

    profile 0   mixed       1 .. max_num_tokens tokens of 1 .. max_batch_size sequences
    profile 1   decode      1 .. max_batch_size sequences of one token

Two, because kernels for one token a sequence read weights once and do little else, while prompts multiply matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmbuild.builder.targets.base import Limits

Shapes = dict[str, list[list[int]]]  # input -> its smallest, usual and largest shape
PREFILL, DECODE = 0, 1
MOST_ELEMENTS = 2**31 - 1  # of one tensor


def profiles(inputs: Mapping[str, list[int | str]], limits: Limits, prefill_batch: int) -> list[Shapes]:
    """Return the shapes of all inputs for both profiles.

    Args:
        inputs: Shapes of the graph's inputs, symbols among them: B, T, S, L.
        limits: block_size is the capacity of a slot.
    """
    batch, tokens = limits.max_batch_size, min(limits.max_num_tokens, limits.max_seq_len)
    some = min(batch, prefill_batch)
    longest = limits.block_size
    usual_keys = min(longest, max(64, longest // 4))
    prompts = {"B": (1, 1, some), "T": (1, min(tokens, 256), tokens), "L": (1, 1, some)}
    decode = {"B": (1, max(1, batch // 2), batch), "T": (1, 1, 1), "L": (1, max(1, batch // 2), batch)}
    keys = {"S": (1, usual_keys, longest)}
    return [shapes(inputs, {**symbols, **keys}) for symbols in (prompts, decode)]


def paged_profiles(inputs: Mapping[str, list[int | str]], limits: Limits) -> list[Shapes]:
    """Return the shapes of all inputs of the graph over pages for both profiles.

    Args:
        inputs: As for `profiles`, with the symbols T, B, B+1, L and slots.
    """
    batch, tokens = limits.max_batch_size, limits.max_num_tokens
    half, most = max(1, batch // 2), most_slots(inputs, limits)
    usual = min(most, batch * max(limits.block_size, limits.max_seq_len // 4))
    sequences = {"B": (1, half, batch), "B+1": (2, half + 1, batch + 1), "L": (1, half, batch)}
    sequences["slots"] = (limits.block_size, max(usual, limits.block_size), most)
    mixed = {**sequences, "T": (1, max(1, tokens // 2), tokens)}
    decode = {**sequences, "T": (1, half, batch)}
    return [shapes(inputs, symbols) for symbols in (mixed, decode)]


def most_slots(inputs: Mapping[str, list[int | str]], limits: Limits) -> int:
    """Return how many slots the pools may have: whole blocks, and no more elements than a tensor can."""
    row = max(math.prod(int(dim) for dim in shape[1:]) for shape in inputs.values() if shape[0] == "slots")
    return MOST_ELEMENTS // row // limits.block_size * limits.block_size


def shapes(inputs: Mapping[str, list[int | str]], symbols: Mapping[str, tuple[int, int, int]]) -> Shapes:
    return {
        name: [[dim if isinstance(dim, int) else symbols[dim][at] for dim in shape] for at in range(3)]
        for name, shape in inputs.items()
    }
