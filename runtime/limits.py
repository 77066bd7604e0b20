"""What a loaded engine can serve: checked when a request is admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llmbuild.engine.manifest import Manifest


class ServingLimits(NamedTuple):
    """max_batch_size: sequences in a step. max_num_tokens: tokens in a step. max_seq_len: prompt and output tokens of a
    sequence. vocab_size: ids are below it, and logits are that wide. eos_token_ids: the model's own ends of sequence.
    num_tokens: sampled ids are below it, because the tokenizer knows no others; None: all of the vocabulary.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    num_tokens: int | None = None

    @staticmethod
    def of(manifest: Manifest) -> ServingLimits:
        limits = manifest.limits
        return ServingLimits(
            limits.max_batch_size,
            limits.max_num_tokens,
            limits.max_seq_len,
            manifest.model.vocab_size,
            tuple(manifest.model.eos_token_ids),
        )
