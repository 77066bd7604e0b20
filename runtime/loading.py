"""Engine directory ⇒ what the runtime needs of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from llmbuild.runtime.executor import Executor
from llmbuild.runtime.limits import ServingLimits
from llmbuild.runtime.tokenizer import Tokenizer


class LoadedEngine(NamedTuple):
    """tokenizer: None for an engine that serves token ids only."""

    executor: Executor
    limits: ServingLimits
    tokenizer: Tokenizer | None


def load_engine(
    path: str | Path, *, num_threads: int | None = None, kv_cache_blocks: int | None = None
) -> LoadedEngine:
    """Check and load an engine directory.

    Args:
        num_threads: Threads of the cpu target; None lets it choose.
        kv_cache_blocks: Blocks of the KV pool; None sizes it for the engine's limits and the memory there is.

    Raises:
        EngineError: Damaged, incomplete, of another version, or not for this machine.
    """
    from llmbuild.engine.reader import open_engine
    from llmbuild.runtime.executors.registry import load_executor

    engine = open_engine(Path(path))
    directory = engine.path / "tokenizer"
    tokenizer = Tokenizer.load(directory) if (directory / "tokenizer.json").is_file() else None
    executor = load_executor(engine, threads=num_threads, num_blocks=kv_cache_blocks)
    return LoadedEngine(executor, ServingLimits.of(engine.manifest), tokenizer)
