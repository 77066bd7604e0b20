from __future__ import annotations

from llmbuild.runtime.sequence import Sequence
from support.requests import LIMITS, request_of


def test_tokens_survive_growth() -> None:
    limits = LIMITS._replace(max_seq_len=1000)
    sequence = Sequence(request_of(5, limits=limits), 0)
    prompt = sequence.tokens.tolist()
    for token in range(995):
        sequence.append(token % 31)
        assert sequence.num_output == token + 1 and sequence.tokens[-1] == token % 31
    assert sequence.tokens.tolist() == prompt + [token % 31 for token in range(995)]
    assert sequence.output.tolist() == [token % 31 for token in range(995)]
    assert sequence.num_pending == 1000 and len(sequence._tokens) == 1000


def test_repr_says_where_it_stands() -> None:
    sequence = Sequence(request_of(3), 1)
    sequence.append(4)
    assert repr(sequence) == "Sequence('r'[1], waiting, 3+1 tokens, 0 cached)"
