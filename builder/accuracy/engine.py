"""The accuracy of an engine as it runs, against the float32 oracle of the model that it was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbuild.builder.accuracy.measures import Figures, Forward, compare, rows_a_step
from llmbuild.builder.accuracy.quantized import HELD_BYTES, evaluation_windows, text_to_dict, weight_bytes
from llmbuild.builder.accuracy.record import figures_to_dict
from llmbuild.builder.accuracy.texts import Text
from llmbuild.builder.accuracy.walk import Runner
from llmbuild.builder.accuracy.windows import BLOCK_SIZE, WINDOW, encode
from llmbuild.errors import ConfigError


@dataclass(frozen=True)
class EngineUnderTest:
    """What is needed of a loaded engine.

    forward: runs a step. block_size: of its KV cache. max_num_tokens, max_seq_len, vocab_size: its limits.
    tokenizer: its tokenizer.json, if it has one. ran_on: what runs it, where that is not its own target.
    """

    forward: Forward
    block_size: int
    max_num_tokens: int
    max_seq_len: int
    vocab_size: int
    tokenizer: bytes | None
    ran_on: str | None = None


@dataclass(frozen=True)
class EngineAccuracy:
    """What was found; see `Figures`."""

    figures: Figures
    text: Text

    def to_dict(self) -> dict[str, Any]:
        """Return what `llmbuild accuracy --json` prints of it."""
        return {"text": text_to_dict(self.text), **figures_to_dict(self.figures)}


def measure_engine(
    engine: EngineUnderTest,
    model: Path,
    *,
    text: Path | None = None,
    tokens: int,
    trust_remote_code: bool = False,
    ignore_config_keys: tuple[str, ...] = (),
    progress: Callable[[int, int, str], None] | None = None,
) -> EngineAccuracy:
    """Compare an engine's logits with those of its model, computed in float32 with torch on the CPU.

    Args:
        model: Hugging Face directory or .gguf file.
        text: Text file or JSONL; None: documentation strings of the installed Python.
        tokens: Most tokens of it.

    Raises:
        ConfigError: The model is not the engine's (another vocabulary or tokenizer), or the text cannot be used.
        AccuracyError: Logits are no distribution.
        UserError: The model cannot be read.
    """
    import torch

    from llmbuild.builder.frontend.load import load_program
    from llmbuild.builder.pipeline import optimize
    from llmbuild.quantization.recipes import find_recipe

    report = progress or (lambda done, total, label: None)
    program = load_program(
        model,
        dtype=torch.float32,
        max_seq_len=engine.max_seq_len,
        trust_remote_code=trust_remote_code,
        ignore_config_keys=ignore_config_keys,
    )
    optimize(program, find_recipe("none"))
    info = program.info
    if info.vocab_size != engine.vocab_size:
        raise ConfigError(
            f"the engine knows {engine.vocab_size} tokens, {info.name} {info.vocab_size}: it was not made from it",
            where="--against",
            hint="give the model that the engine was converted from",
        )
    found, windows = evaluation_windows(
        text,
        engine.tokenizer,
        tokens=tokens,
        length=min(engine.max_seq_len, info.max_position_embeddings),
        vocab_size=info.vocab_size,
        bos_token_id=info.bos_token_id,
        option="--text",
    )
    own = encode(program.tokenizer_files.get("tokenizer.json"), found.content, info.bos_token_id)
    if own != encode(engine.tokenizer, found.content, info.bos_token_id):
        raise ConfigError(
            f"the tokenizers of the engine and of {info.name} give different tokens for {found.source}",
            where="--against",
            hint="give the model that the engine was converted from",
        )
    oracle = Runner(program, hold=weight_bytes(program) <= HELD_BYTES)
    figures = compare(
        oracle.forward,
        engine.forward,
        windows,
        chunk=rows_a_step(info.vocab_size, min(WINDOW, engine.max_num_tokens)),
        block_sizes=(BLOCK_SIZE, engine.block_size),
        progress=lambda done, total: report(done, total, ""),
    )
    return EngineAccuracy(figures, found)
