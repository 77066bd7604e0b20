"""The KV pools are updated in place: no step copies them, however large they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from support.cpu_engines import LIMITS, Conversation, compiled, needs_compiler, open_session, run_step
from support.traced import optimized

FORMS = [pytest.param(False, id="dense"), pytest.param(True, id="paged", marks=needs_compiler)]


@pytest.mark.parametrize("native", FORMS)
def test_a_step_writes_its_slots_and_nothing_else(native: bool, tmp_path: Path) -> None:
    target = compiled(optimized("llama"), tmp_path / "engine", native=native)
    session = open_session(tmp_path / "engine", target)
    conversation = Conversation()
    step = conversation.step({"a": [1, 2, 3, 4, 5, 6], "b": [7]})
    run_step(session, target, step)
    assert set(session.pools) == {"keys.0", "values.0", "keys.1", "values.1"}
    for pool in session.pools.values():
        slot_axis = pool.shape.index(conversation.num_blocks * LIMITS.block_size)
        written = np.flatnonzero(np.moveaxis(pool, slot_axis, 0).any(axis=tuple(range(1, pool.ndim))))
        assert written.tolist() == sorted(step.slot_mapping.tolist())


@pytest.mark.parametrize("native", FORMS)
def test_pools_of_gigabytes_are_not_touched(native: bool, tmp_path: Path) -> None:
    """Pools are zero pages until written. A copy of the four pools of 512 MiB would make all of them resident."""
    target = compiled(optimized("llama"), tmp_path / "engine", native=native)
    num_blocks = (512 << 20) // (LIMITS.block_size * 32 * 4)
    session = open_session(tmp_path / "engine", target, num_blocks=num_blocks)
    assert sum(pool.nbytes for pool in session.pools.values()) == 4 * (512 << 20)
    before = psutil.Process().memory_info().rss
    conversation = Conversation(num_blocks=num_blocks)
    for _ in range(3):
        run_step(session, target, conversation.step({"a": [1, 2, 3], "b": [7]}))
    assert psutil.Process().memory_info().rss - before < 64 << 20
