"""One request at a time, without cache, batch, scheduler or streaming: what the runtime's tokens are compared with.

Every token must stand for whole characters, so that the text is final after each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tokenizers

from llmbuild.runtime.sampler import SamplingBatch, sample
from llmbuild.runtime.sampling_batch import RowExtras
from llmbuild.runtime.sampling_params import SamplingParams
from support.fake_executor import reference_logits


class Expected(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None


def run_alone(
    prompt: list[int],
    params: SamplingParams,
    *,
    index: int,
    max_tokens: int,
    vocab_size: int,
    eos: tuple[int, ...],
    tokenizer: tokenizers.Tokenizer,
) -> Expected:
    """Return completion `index` of a request: the whole sequence is computed anew for each token."""
    eos_ids = set() if params.ignore_eos else set(eos)
    stop_ids = eos_ids | set(params.stop_token_ids or ())
    output: list[int] = []
    while True:
        batch = _batch(prompt, output, params, index, stop_ids)
        tokens = np.array(prompt + output, np.int32)
        output.append(int(sample(reference_logits(tokens, vocab_size), batch).token_ids[0]))
        if output[-1] in stop_ids:
            shown = output if params.include_stop_str_in_output else output[:-1]
            reason = None if output[-1] in eos_ids else output[-1]
            return Expected(output, _decode(tokenizer, shown, params), "stop", reason)
        match = _stop_string(tokenizer, output, params)
        if match is not None:
            return Expected(output, match[0], "stop", match[1])
        if len(output) == max_tokens:
            return Expected(output, _decode(tokenizer, output, params), "length", None)


def _batch(
    prompt: list[int], output: list[int], params: SamplingParams, index: int, stop_ids: set[int]
) -> SamplingBatch:
    def ids(values) -> np.ndarray:
        return np.array(sorted(values), np.int64)

    assert params.seed is not None
    bias = params.logit_bias
    extras = RowExtras(
        prompt=np.array(prompt) if params.has_penalties else None,
        output=np.array(output, np.int64) if params.has_penalties else None,
        banned=ids(stop_ids) if len(output) < params.min_tokens and stop_ids else None,
        bias=None if bias is None else (np.array(list(bias)), np.array(list(bias.values()), np.float32)),
        allowed=None if params.allowed_token_ids is None else ids(params.allowed_token_ids),
    )
    return SamplingBatch(
        temperature=np.array([params.temperature], np.float32),
        top_k=np.array([params.top_k], np.int32),
        top_p=np.array([params.top_p], np.float32),
        min_p=np.array([params.min_p], np.float32),
        presence=np.array([params.presence_penalty], np.float32),
        frequency=np.array([params.frequency_penalty], np.float32),
        repetition=np.array([params.repetition_penalty], np.float32),
        seeds=np.array([params.seed], np.uint64),
        streams=np.array([index], np.int32),
        token_indices=np.array([len(output)], np.int32),
        all_greedy=params.temperature == 0,
        extras=(extras,),
    )


def _decode(tokenizer: tokenizers.Tokenizer, ids: list[int], params: SamplingParams) -> str:
    return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


def _stop_string(tokenizer: tokenizers.Tokenizer, output: list[int], params: SamplingParams) -> tuple[str, str] | None:
    """Return (text, stop string) when the newest token completes one after the first min_tokens tokens."""
    if not params.stop or len(output) <= params.min_tokens:
        return None
    text = _decode(tokenizer, output, params)
    start = len(_decode(tokenizer, output[: params.min_tokens], params)) if params.min_tokens else 0
    found = [(text.find(stop, start), -len(stop), stop) for stop in params.stop if stop in text[start:]]
    if not found:
        return None
    begin, _, stop = min(found)
    return text[: begin + (len(stop) if params.include_stop_str_in_output else 0)], stop
