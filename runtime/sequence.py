"""`Sequence`: one completion in the making. Its tokens, how many of them are cached, and where it stands."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llmbuild.runtime.request import Request


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens are appended and never removed, so that preemption can neither lose nor repeat one.

        tokens:  |---------- prompt ----------|------- output -------|
                 0                        prompt_len             num_tokens
        cache:   |------- cached -------|---------- pending ---------|
                 0                  num_cached                   num_tokens

    A decoding sequence has one pending token, a preempted one has no cached token: its prompt and output are computed
    again, and the next sampled token is the one it would have got.
    """

    __slots__ = (
        "_tokens",
        "index",
        "max_tokens",
        "num_blocks",
        "num_cached",
        "num_tokens",
        "preemptions",
        "prompt_len",
        "request",
        "row",
        "status",
    )

    def __init__(self, request: Request, index: int) -> None:
        """Args: index: which of the request's n completions."""
        prompt = request.prompt_token_ids
        self.request = request
        self.index = index
        self.max_tokens = request.max_tokens
        self.prompt_len = len(prompt)
        self.num_tokens = len(prompt)
        self.num_cached = 0
        self.status = Status.WAITING
        self.preemptions = 0
        # Owned by the BlockManager: the row of its tables that holds this sequence's blocks, and how many there are.
        self.row: int | None = None
        self.num_blocks = 0
        self._tokens = np.empty(len(prompt) + min(self.max_tokens, 64), np.int32)
        self._tokens[: len(prompt)] = prompt

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and output, int32 [num_tokens] (a view)."""
        return self._tokens[: self.num_tokens]

    @property
    def output(self) -> np.ndarray:
        """Output tokens, int32 [num_output] (a view)."""
        return self._tokens[self.prompt_len : self.num_tokens]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_cached

    def append(self, token: int) -> None:
        """Add a sampled token; it is pending until the next step."""
        if self.num_tokens == len(self._tokens):
            longest = self.prompt_len + self.max_tokens
            grown = np.empty(min(2 * self.num_tokens, longest), np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1

    def settle(self, position: int, token: int) -> None:
        """Put a token in the place that was appended for it before it was known."""
        self._tokens[position] = token

    @property
    def is_complete(self) -> bool:
        """Whether it has all the tokens that it may get; the last may not be known yet."""
        return self.num_output >= self.max_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}[{self.index}], {self.status.value}, "
            f"{self.prompt_len}+{self.num_output} tokens, {self.num_cached} cached)"
        )
