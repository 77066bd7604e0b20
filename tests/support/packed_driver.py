"""Drive a packed, paged model as a server would: ragged chunked prefill, decode, requests that join later.

    logits = drive(run, [Request(prompt, chunks=(5, 3), new_tokens=4), Request(other, arrives=2)])

`run` is anything that takes a `StepInput` and returns logits [L, V]: the oracle, or an executor's `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmbuild.runtime.executor import StepInput

Run = Callable[[StepInput], np.ndarray]


@dataclass
class Request:
    """One sequence. Its tokens are given: the continuation is forced, so that runs can be compared token by token.

    Args:
        tokens: Prompt and continuation.
        prompt: How many of them are the prompt.
        chunks: Sizes of the prefill chunks; the rest of the prompt comes in one last chunk.
        arrives: Step in which it joins.
    """

    tokens: Sequence[int]
    prompt: int
    chunks: tuple[int, ...] = ()
    arrives: int = 0
    done: int = 0
    blocks: list[int] = field(default_factory=list)

    def next_chunk(self) -> int:
        """Number of tokens of the next step, 0 when finished."""
        begin = 0
        for chunk in self.chunks:
            if self.done == begin and begin + chunk < self.prompt:
                return chunk
            begin += chunk
        return min(self.prompt - self.done if self.done < self.prompt else 1, len(self.tokens) - self.done)


def drive(
    run: Run, requests: Sequence[Request], *, block_size: int = 8, num_blocks: int = 64, all_rows: bool = True
) -> list[np.ndarray]:
    """Run all requests to their end and return each one's logits, float32 [tokens, V].

    Args:
        block_size: Tokens per KV block; blocks are handed out in shuffled order.
        all_rows: Ask for the logits of every token; else only for the last of each chunk (other rows stay NaN).
    """
    free = np.random.default_rng(3).permutation(num_blocks).tolist()
    requests = [Request(r.tokens, r.prompt, r.chunks, r.arrives) for r in requests]
    found: list[dict[int, np.ndarray]] = [{} for _ in requests]
    clock = 0
    while any(request.done < len(request.tokens) for request in requests):
        active = [i for i, r in enumerate(requests) if r.arrives <= clock and r.done < len(r.tokens)]
        clock += 1
        if not active:
            continue
        step, rows = next_step([requests[i] for i in active], free, block_size, all_rows)
        logits = np.asarray(run(step))
        assert logits.shape[0] == len(rows)
        for (owner, position), row in zip(rows, logits, strict=True):
            found[active[owner]][position] = row
    return [spread(rows, len(request.tokens)) for rows, request in zip(found, requests, strict=True)]


def next_step(
    active: Sequence[Request], free: list[int], block_size: int, all_rows: bool
) -> tuple[StepInput, list[tuple[int, int]]]:
    """Return the packed step that advances `active`, and for each logits row (request, position)."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    bounds, lengths, wanted = [0], [], []
    rows: list[tuple[int, int]] = []
    for owner, request in enumerate(active):
        begin, end = request.done, request.done + request.next_chunk()
        while len(request.blocks) * block_size < end:
            request.blocks.append(free.pop())
        for position in range(begin, end):
            if all_rows or position == end - 1:
                wanted.append(len(ids))
                rows.append((owner, position))
            ids.append(request.tokens[position])
            positions.append(position)
            slots.append(request.blocks[position // block_size] * block_size + position % block_size)
        request.done = end
        bounds.append(len(ids))
        lengths.append(end)
    width = max(len(request.blocks) for request in active)
    tables = [request.blocks + [0] * (width - len(request.blocks)) for request in active]
    arrays = (ids, positions, slots, tables, lengths, bounds, wanted)
    return StepInput(*(np.asarray(array, dtype=np.int32) for array in arrays)), rows


def spread(rows: dict[int, np.ndarray], length: int) -> np.ndarray:
    width = len(next(iter(rows.values())))
    out = np.full((length, width), np.nan, dtype=np.float32)
    for position, row in rows.items():
        out[position] = row
    return out


def mixed_requests(vocab_size: int, seed: int = 0) -> list[Request]:
    """Three requests whose prompts cross block edges (8), chunk edges and small attention windows; one joins late."""
    rng = np.random.default_rng(seed)
    draw = lambda count: [int(token) for token in rng.integers(3, min(vocab_size, 250), count)]  # noqa: E731
    return [
        Request(draw(23), prompt=19, chunks=(7, 5)),
        Request(draw(9), prompt=3),
        Request(draw(14), prompt=9, chunks=(8,), arrives=3),
    ]
