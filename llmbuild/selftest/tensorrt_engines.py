"""What a self-test asks of TensorRT engines besides right logits: steps in graphs, and engines of other forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmbuild.errors import LLMBuildError

if TYPE_CHECKING:
    from llmbuild.runtime.loading import LoadedEngine


def captured(loaded: LoadedEngine | None) -> str:
    """Say which batch sizes were captured.

    Raises:
        LLMBuildError: One could not be; the reason is TensorRT's.
    """
    assert loaded is not None
    executor: Any = loaded.executor
    if executor.graph_problem is not None:
        raise LLMBuildError(f"no CUDA graphs: {executor.graph_problem}")
    return f"captured for batches of {', '.join(map(str, executor.captured))}"


def other_engine(build: Callable[[], str], load: Callable[[], LoadedEngine], compare: Callable[[Any], str]) -> str:
    """Build, load and run an engine of another form: stripped of its weights, or with the kernels of attention stored.

    Args:
        build: Returns what was built, in words.
        load: Loads it.
        compare: Runs an executor's `forward` through all steps; returns the largest error, in words.
    """
    built, loaded = build(), load()
    try:
        return f"{built}; {compare(loaded.executor.forward)}"
    finally:
        loaded.executor.close()
