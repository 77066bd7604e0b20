"""Engine directory ⇒ what the runtime needs of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from llmbuild.errors import ConfigError
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
        ConfigError: An option is no positive integer.
        EngineError: Damaged, incomplete, of another version, or not for this machine.
    """
    for name, value in {"num_threads": num_threads, "kv_cache_blocks": kv_cache_blocks}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is {value!r}", hint="allowed: None, or an integer of at least 1")
    from llmbuild.engine.reader import open_engine
    from llmbuild.runtime.executors.registry import load_executor

    engine = open_engine(Path(path))
    directory = engine.path / "tokenizer"
    tokenizer = Tokenizer.load(directory) if (directory / "tokenizer.json").is_file() else None
    executor = load_executor(engine, threads=num_threads, num_blocks=kv_cache_blocks)
    limits = ServingLimits.of(engine.manifest)
    # Checkpoints pad the vocabulary to a round size: rows that were never trained and that no text stands for.
    if tokenizer is not None and tokenizer.num_tokens < limits.vocab_size:
        limits = limits._replace(num_tokens=tokenizer.num_tokens)
    return LoadedEngine(executor, limits, tokenizer)
