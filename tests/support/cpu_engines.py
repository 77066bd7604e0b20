"""Engines of the cpu target made from tiny models, with the oracle of the same program to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmbuild.builder.ir import Program
from llmbuild.builder.oracle import Oracle
from llmbuild.builder.targets.base import CompiledTarget, CompileOptions, Limits
from llmbuild.builder.targets.cpu import native_library
from llmbuild.builder.targets.cpu.target import CpuTarget
from llmbuild.plugins.attention_reference import PagedState
from llmbuild.runtime.executor import StepInput
from llmbuild.runtime.executors.cpu_dense import split_step
from llmbuild.runtime.executors.cpu_session import CpuSession

needs_compiler = pytest.mark.skipif(native_library.find_compiler() is None, reason="no C++ compiler")

LIMITS = Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=128, block_size=4)


def compiled(program: Program, directory: Path, *, native: bool) -> CompiledTarget:
    return CpuTarget(native=native).compile(program, CompileOptions(LIMITS, "float32"), directory)


def open_session(directory: Path, target: CompiledTarget, num_blocks: int = 64) -> CpuSession:
    section = target.section
    library = section["native"] and directory / section["native"]["library"]
    slots = num_blocks * LIMITS.block_size
    return CpuSession(directory / section["model"], directory / section["weights"], library, slots=slots, threads=2)


def run_step(session: CpuSession, target: CompiledTarget, step: StepInput) -> np.ndarray:
    """Run one step on a bare session, whichever attention it has. Returns logits [L, V]."""
    if target.section["attention"] == "paged":
        return session.run(step._asdict()).copy()
    logits = np.empty((len(step.logits_indices), session.vocab_size), np.float32)
    for run in split_step(step, LIMITS.block_size, session.inputs):
        logits[run.rows] = session.run(run.inputs)
    return logits


@dataclass
class Conversation:
    """Sequences that grow step by step in one pool whose blocks are handed out in a scattered order.

    `step(chunks)` packs the given new tokens of each sequence and asks for the logits of all of them.
    """

    num_blocks: int = 64
    block_size: int = LIMITS.block_size
    first_block: int = 0

    def __post_init__(self) -> None:
        self.free = list(self.first_block + np.random.default_rng(0).permutation(min(self.num_blocks, 4096)))
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, chunks: dict[str, list[int]], *, last_only: bool = False) -> StepInput:
        size = self.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in chunks.items():
            begin = self.lengths.get(name, 0)
            self.lengths[name] = begin + len(tokens)
            table = self.tables.setdefault(name, [])
            while len(table) * size < self.lengths[name]:
                table.append(int(self.free.pop()))
            ids += tokens
            positions += range(begin, begin + len(tokens))
            slots += [table[p // size] * size + p % size for p in range(begin, begin + len(tokens))]
            starts.append(len(ids))
        width = max(len(self.tables[name]) for name in chunks)
        tables = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in chunks]
        wanted = [end - 1 for end in starts[1:]] if last_only else list(range(len(ids)))
        arrays = (ids, positions, slots, tables, [self.lengths[name] for name in chunks], starts, wanted)
        return StepInput(*(np.array(array, np.int32) for array in arrays))


def scenario(vocab_size: int = 256, seed: int = 1) -> list[dict[str, list[int]]]:
    """Chunks of a run in which sequences join, prefill in pieces across block and window edges, decode and leave."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return random.integers(0, vocab_size, count).tolist()

    return [
        {"a": tokens(7), "b": tokens(1)},
        {"a": tokens(1), "b": tokens(1), "c": tokens(9)},
        {"b": tokens(1), "a": tokens(1), "c": tokens(5)},
        {"a": tokens(1), "b": tokens(1), "c": tokens(1)},
        {"c": tokens(3), "b": tokens(2)},
        {"c": tokens(1)},
    ]


def oracle_logits(program: Program) -> list[np.ndarray]:
    """Run the scenario on the oracle; logits of every token, step by step."""
    conversation = Conversation()
    oracle, state = Oracle(program), PagedState(conversation.num_blocks, LIMITS.block_size)
    return [oracle.run(conversation.step(chunks), state).numpy() for chunks in scenario()]


def session_logits(session: CpuSession, target: CompiledTarget) -> list[np.ndarray]:
    """Run the scenario on a compiled engine's session."""
    conversation = Conversation()
    return [run_step(session, target, conversation.step(chunks)) for chunks in scenario()]
