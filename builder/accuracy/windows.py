"""Text ⇒ windows of tokens ⇒ packed steps, the same for the oracle and for an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmbuild.errors import ConfigError

WINDOW = 512  # tokens that see one another
BLOCK_SIZE = 16  # of the oracle's KV cache

Window = tuple[int, ...]


class Step(NamedTuple):
    """One sequence's next tokens, with the fields of `runtime.executor.StepInput` (which the builder cannot import)."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    slot_mapping: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray
    logits_indices: np.ndarray


class Encoded(NamedTuple):
    """ids: of the text, without special tokens. prefix: what a text begins with: the BOS, or nothing."""

    ids: list[int]
    prefix: Window


def encode(definition: bytes | None, text: str, bos_token_id: int | None) -> Encoded:
    """Return the ids of a text.

    Args:
        definition: tokenizer.json, as in `Program.tokenizer_files` and in an engine; None: there is none.
        bos_token_id: Put before each window if the tokenizer puts it before a text.

    Raises:
        ConfigError: There is no tokenizer, or it cannot be read.
    """
    import tokenizers

    if definition is None:
        raise ConfigError("the model has no tokenizer, which accuracy is measured with", hint="add a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"the tokenizer cannot be read: {error}", where="tokenizer.json") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    around = tokenizer.encode("", add_special_tokens=True).ids
    begins = bos_token_id is not None and around[:1] == [bos_token_id]
    return Encoded(tokenizer.encode(text, add_special_tokens=False).ids, tuple(around[:1]) if begins else ())


def cut(encoded: Encoded, *, tokens: int, length: int, vocab_size: int, source: str) -> list[Window]:
    """Cut a text's first `tokens` ids into windows of at most `length`, prefix included.

    A rest of which nothing can be predicted is left out.

    Raises:
        ConfigError: The text gives no window, or an id that the model does not know.
    """
    ids, prefix = encoded.ids[:tokens], encoded.prefix
    size = max(1, length - len(prefix))
    windows = [(*prefix, *ids[begin : begin + size]) for begin in range(0, len(ids), size)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError(
            f"{source} gives {len(ids)} token(s), of which nothing can be predicted", hint="give a longer text"
        )
    largest = max(map(max, windows))
    if largest >= vocab_size:
        raise ConfigError(
            f"{source} has the token id {largest}, but the model knows {vocab_size} tokens only",
            hint="the tokenizer and the model do not belong together, or the text names an added token",
        )
    return windows


def steps(window: Sequence[int], *, chunk: int, block_size: int) -> Iterator[tuple[Step, np.ndarray]]:
    """Yield the steps that process a window, each with the ids that its rows predict, [rows], one less in the last.

    All rows of logits are asked for. The sequence owns the blocks 0, 1, ...; those of a window before are reused:

        window  |---- chunk ----|---- chunk ----|-- rest --|
                0             begin            end
    """
    ids = np.asarray(window, np.int32)
    table = np.arange(-(-len(ids) // block_size), dtype=np.int32)
    for begin in range(0, len(ids), chunk):
        end = min(begin + chunk, len(ids))
        positions = np.arange(begin, end, dtype=np.int32)
        step = Step(
            input_ids=ids[begin:end],
            position_ids=positions,
            slot_mapping=positions,  # block p // block_size is number p // block_size
            block_tables=table[None, : -(-end // block_size)],
            seq_lens=np.array([end], np.int32),
            cu_q_lens=np.array([0, end - begin], np.int32),
            logits_indices=np.arange(end - begin, dtype=np.int32),
        )
        yield step, ids[begin + 1 : end + 1]
