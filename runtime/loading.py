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
    path: str | Path,
    *,
    num_threads: int | None = None,
    kv_cache_blocks: int | None = None,
    kv_memory_fraction: float | None = None,
    device: int | None = None,
) -> LoadedEngine:
    """Check and load an engine directory.

    Args:
        num_threads: Threads of the cpu target; None lets it choose.
        kv_cache_blocks: Blocks of the KV pool; None sizes it for the engine's limits and the memory there is.
        kv_memory_fraction: How much of the GPU memory that is left may hold KV blocks (cuda, tensorrt); None: 0.9.
        device: Number of the GPU; None: 0. Not with the cpu target.

    Raises:
        ConfigError: An option is out of range, or the engine's target does not have it.
        EngineError: Damaged, incomplete, of another version, or not for this machine.
    """
    for name, value in {"num_threads": num_threads, "kv_cache_blocks": kv_cache_blocks}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is {value!r}", hint="allowed: None, or an integer of at least 1")
    if device is not None and (not isinstance(device, int) or isinstance(device, bool) or device < 0):
        raise ConfigError(f"device is {device!r}", hint="allowed: None, or the number of a GPU")
    from llmbuild.engine.reader import open_engine
    from llmbuild.runtime.executors.registry import load_executor

    engine = open_engine(Path(path))
    directory = engine.path / "tokenizer"
    tokenizer = Tokenizer.load(directory) if (directory / "tokenizer.json").is_file() else None
    executor = load_executor(
        engine,
        threads=num_threads,
        num_blocks=kv_cache_blocks,
        kv_memory_fraction=kv_memory_fraction,
        device=device,
    )
    limits = ServingLimits.of(engine.manifest)
    # Checkpoints pad the vocabulary to a round size: rows that were never trained and that no text stands for.
    if tokenizer is not None and tokenizer.num_tokens < limits.vocab_size:
        limits = limits._replace(num_tokens=tokenizer.num_tokens)
    return LoadedEngine(executor, limits, tokenizer)
