"""`Completion`: what becomes of a sequence's tokens. Text, stops, log-probabilities, and the output to show."""

from __future__ import annotations

from llmbuild.runtime.outputs import CompletionOutput, FinishReason, Logprob
from llmbuild.runtime.sampler import TokenLogprobs
from llmbuild.runtime.sequence import Sequence
from llmbuild.runtime.stop_checker import StopChecker
from llmbuild.runtime.tokenizer import Tokenizer


class Completion:
    """Takes the tokens of one sequence in order. Without a tokenizer the text stays empty."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens) if tokenizer else None
        self._text = StopChecker(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        # What the last output of a stream has shown already.
        self._shown_tokens = 0
        self._shown_text = 0

    def take(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next sampled token, which the sequence holds. Return whether the completion is finished."""
        sequence, request = self.sequence, self.sequence.request
        self._token_ids.append(token)  # the sequence may hold one more, which is not known yet
        count = len(self._token_ids)
        if logprobs is not None:
            self._note_logprobs(logprobs)
        if token in request.stop_ids:
            self._stop_reason = None if token in request.eos_ids else token
            self._end("stop", token if request.params.include_stop_str_in_output else None)
            return True
        new = self._detokenizer.feed(token) if self._detokenizer is not None else ""
        stop = self._text.feed(new, search=count > request.params.min_tokens)
        if stop is not None:
            self._stop_reason = stop
            self.finish_reason = "stop"
        elif count >= sequence.max_tokens:
            self._end("length")
        return self.finish_reason is not None

    def abort(self) -> None:
        """End here; what was held back is shown."""
        self._end("abort")

    def _end(self, reason: FinishReason, last_token: int | None = None) -> None:
        self.finish_reason = reason
        if self._detokenizer is not None:
            last = "" if last_token is None else self._detokenizer.feed(last_token)
            self._text.feed(last + self._detokenizer.flush(), search=False)
        self._text.end()

    def output(self) -> CompletionOutput:
        """Return the completion up to now, and note what it shows as shown."""
        text = self._text.text[: self._text.visible]
        output = CompletionOutput(
            index=self.sequence.index,
            text=text,
            token_ids=self._token_ids.copy(),
            new_text=text[self._shown_text :],
            new_token_ids=self._token_ids[self._shown_tokens :],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        self._shown_tokens, self._shown_text = len(self._token_ids), len(text)
        return output

    def _note_logprobs(self, found: TokenLogprobs) -> None:
        assert self._logprobs is not None
        ids, values = found.token_ids.tolist(), found.logprobs.tolist()
        ranks = [found.rank, *range(1, len(ids))]
        entry: dict[int, Logprob] = {}
        for token, value, rank in zip(ids, values, ranks, strict=True):
            # The sampled token comes first; if it is among the likeliest too, its own rank stands.
            if token not in entry:
                text = self._tokenizer.decode([token], skip_special_tokens=False) if self._tokenizer else None
                entry[token] = Logprob(value, rank, text)
        self._logprobs.append(entry)
        self._cumulative_logprob += values[0]
