"""How `llmbuild accuracy` runs an engine: with the runtime of its target, or in the interpreter of the cuda target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmbuild.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from llmbuild.builder.accuracy.engine import EngineUnderTest
    from llmbuild.runtime.executor import StepInput

INTERPRETER = "interpreter"


@contextmanager
def engine_under_test(
    engine: Path,
    against: Path,
    *,
    threads: int | None,
    device: str | None,
    trust_remote_code: bool,
    ignore_config_keys: tuple[str, ...],
) -> Iterator[EngineUnderTest]:
    """Load an engine for the length of the `with` block.

    Args:
        against: Its model.
        device: Number of a GPU, or "interpreter"; None takes the first GPU.

    Raises:
        UserError: It cannot run here, or an option does not fit it.
    """
    if device != INTERPRETER:
        with _on_its_target(engine, threads, gpu_number(device)) as subject:
            yield subject
        return
    if threads is not None:
        raise ConfigError("the interpreter has no threads to choose", where="--threads", hint="leave it out")
    from llmbuild.builder.accuracy.engine import EngineUnderTest
    from llmbuild.builder.accuracy.interpreted import first_sm, interpreted
    from llmbuild.engine.reader import open_engine

    opened = open_engine(engine, requirements=False)  # of packages that reach a GPU
    runner = interpreted(opened, against, trust_remote_code=trust_remote_code, ignore_config_keys=ignore_config_keys)
    limits = opened.manifest.limits
    yield EngineUnderTest(
        forward=lambda step: runner.forward(_as_input(step)),
        block_size=runner.block_size,
        # A plan makes logits for a step of sequences, and here every token's are asked for.
        max_num_tokens=min(limits.max_num_tokens, limits.max_batch_size),
        max_seq_len=limits.max_seq_len,
        vocab_size=opened.manifest.model.vocab_size,
        tokenizer=_tokenizer(engine),
        ran_on=f"{INTERPRETER}, SM {first_sm(opened)}",
    )


@contextmanager
def _on_its_target(engine: Path, threads: int | None, device: int | None) -> Iterator[EngineUnderTest]:
    from llmbuild.runtime.loading import load_engine

    try:
        loaded = load_engine(engine, num_threads=threads, device=device)
    except DeviceError as error:
        hint = f"{error.hint}; without one, --device {INTERPRETER} runs the plan of a tiny model on the CPU"
        raise DeviceError(error.what, where=error.where, hint=hint) from error
    try:
        from llmbuild.builder.accuracy.engine import EngineUnderTest

        limits, executor = loaded.limits, loaded.executor
        yield EngineUnderTest(
            forward=lambda step: executor.forward(_as_input(step)),
            block_size=executor.block_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            vocab_size=limits.vocab_size,
            tokenizer=_tokenizer(engine),
        )
    finally:
        loaded.executor.close()


def gpu_number(device: str | None) -> int | None:
    """Return the number that `--device` gives; None where it is left out. Raises ConfigError for what is none."""
    if device is None:
        return None
    if not device.isascii() or not device.isdigit():
        raise ConfigError(
            f"device is {device!r}", where="--device", hint=f"give the number of a GPU, such as 0, or {INTERPRETER}"
        )
    return int(device)


def _as_input(step: tuple[object, ...]) -> StepInput:
    from llmbuild.runtime.executor import StepInput

    return StepInput(*step)  # type: ignore[arg-type]  # a builder's Step has the same fields


def _tokenizer(engine: Path) -> bytes | None:
    definition = engine / "tokenizer" / "tokenizer.json"
    return definition.read_bytes() if definition.is_file() else None
