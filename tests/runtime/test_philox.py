from __future__ import annotations

import pytest

from llmbuild.runtime.philox import philox4x32, uniform

ONES = 0xFFFFFFFF


# Known answers published with the algorithm (Random123, kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, words) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_depends_on_each_argument_and_fills_the_interval() -> None:
    assert len({uniform(s, t, i) for s in (0, 1, 2**32, 2**63) for t in range(3) for i in range(50)}) == 4 * 3 * 50
    drawn = [uniform(7, 0, i) for i in range(4000)]
    assert 0 <= min(drawn) < 0.01 and 0.99 < max(drawn) < 1
    assert abs(sum(drawn) / len(drawn) - 0.5) < 0.02
