"""A fake model in numpy that reads its whole past through the block tables, and a reference that has no cache.

The logits after a token are a hash of every (token, position) from the sequence's start to it. The fake stores the
terms of the hash in a pool by `slot_mapping` and adds them up through `block_tables`: one wrong slot, table, length or
position, or one block given to two sequences, and the tokens differ from the reference's.
"""

from __future__ import annotations

import numpy as np

from llmbuild.engine.reader import Engine
from llmbuild.runtime.executor import PendingTokens, StepInput
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.sampler import SampledTokens, SamplingBatch, sample

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SPREAD = np.uint64(0xBF58476D1CE4E5B9)


def hash_terms(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one uint64 per (token, position)."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _MIX + positions.astype(np.uint64) * _SPREAD
    mixed ^= mixed >> np.uint64(29)
    return mixed * _SPREAD


def logits_of_hash(hashes: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return float32 [L, V] in (-4, 4) for uint64 [L]."""
    mixed = (hashes[:, None] ^ (hashes[:, None] >> np.uint64(31))) + np.arange(vocab_size, dtype=np.uint64) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _SPREAD
    return ((mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)) * 8


def reference_logits(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the fake model's float32 [1, V] after `tokens`, computed without cache or blocks."""
    terms = hash_terms(tokens, np.arange(len(tokens)))
    return logits_of_hash(np.array([terms.sum(dtype=np.uint64)]), vocab_size)


class FakeExecutor:
    """Checks the shapes and dtypes of what it is given, besides computing with it."""

    def __init__(self, limits: ServingLimits, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.limits = limits
        self.steps = 0
        self.largest_step = 0
        self.closed = False
        self.fail_at_step: int | None = None
        # Not zeros: reading a slot that was never written must show.
        self._pool = np.random.default_rng(0).integers(1, 2**63, num_blocks * block_size, dtype=np.uint64)

    def forward(self, step: StepInput) -> np.ndarray:
        self._check(step)
        self.steps += 1
        self.largest_step = max(self.largest_step, len(step.input_ids))
        if self.steps == self.fail_at_step:
            raise RuntimeError("the device fell off the bus")
        self._pool[step.slot_mapping] = hash_terms(step.input_ids, step.position_ids)
        owners = np.searchsorted(step.cu_q_lens, step.logits_indices, side="right") - 1
        hashes = np.zeros(len(owners), np.uint64)
        for row, (owner, token) in enumerate(zip(owners.tolist(), step.logits_indices.tolist(), strict=True)):
            # tokens of the owner after this one, in this step:
            after = int(step.cu_q_lens[owner + 1]) - 1 - token
            positions = np.arange(int(step.seq_lens[owner]) - after)
            slots = step.block_tables[owner, positions // self.block_size] * self.block_size
            hashes[row] = self._pool[slots + positions % self.block_size].sum(dtype=np.uint64)
        return logits_of_hash(hashes, self.limits.vocab_size)

    def execute(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        return sample(self.forward(step), sampling)

    def close(self) -> None:
        self.closed = True

    def _check(self, step: StepInput) -> None:
        tokens, sequences = len(step.input_ids), len(step.seq_lens)
        assert all(array.dtype == np.int32 for array in step), [array.dtype for array in step]
        assert 0 < tokens <= self.limits.max_num_tokens
        assert 0 < sequences <= self.limits.max_batch_size
        assert step.position_ids.shape == step.slot_mapping.shape == (tokens,)
        assert step.cu_q_lens.shape == (sequences + 1,) and step.block_tables.shape[0] == sequences
        assert step.cu_q_lens[0] == 0 and step.cu_q_lens[-1] == tokens and (np.diff(step.cu_q_lens) > 0).all()
        assert step.block_tables.min() >= 0 and step.block_tables.max() < self.num_blocks
        assert step.seq_lens.max() <= self.limits.max_seq_len
        assert len(step.logits_indices) <= sequences
        assert len(np.unique(step.slot_mapping)) == tokens, "two tokens share a slot"
        for row in range(sequences):
            last = int(step.cu_q_lens[row + 1]) - 1
            assert step.position_ids[last] == step.seq_lens[row] - 1


class AsyncFakeExecutor(FakeExecutor):
    """The same with steps that are started first and collected later. Tokens of the step before come from the device:
    what the host wrote in their places must not matter.
    """

    def __init__(self, limits: ServingLimits, *, num_blocks: int, block_size: int) -> None:
        super().__init__(limits, num_blocks=num_blocks, block_size=block_size)
        self._last = np.zeros(0, np.int32)
        self.fed = self.pending = 0
        self.is_warm = False

    def warm_up(self) -> None:
        self.is_warm = True

    def execute_async(self, step: StepInput, sampling: SamplingBatch, feed: np.ndarray | None = None) -> PendingTokens:
        self.pending += 1
        assert self.pending <= 2
        ids = step.input_ids.copy()
        if feed is not None:
            assert feed.shape == ids.shape and feed.max() < len(self._last)
            self.fed += int((feed >= 0).sum())
            ids = np.where(feed >= 0, self._last[feed], ids)
        tokens = self.execute(step._replace(input_ids=ids), sampling)
        self._last = tokens.token_ids

        def result() -> SampledTokens:
            self.pending -= 1
            return tokens

        return PendingTokens(result)

    def can_overlap(self, sampling: SamplingBatch) -> bool:
        return all(extra is None or extra.output is None for extra in sampling.extras or ())


def executor_of(engine: Engine, *, threads: int | None = None, num_blocks: int = 64) -> FakeExecutor:
    """Return a fake for an engine directory, as the registry of executors calls it."""
    block_size = engine.manifest.kv_cache.block_size
    return FakeExecutor(ServingLimits.of(engine.manifest), num_blocks=num_blocks, block_size=block_size)
