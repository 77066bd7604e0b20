"""`CountRows`: which sequence owns which row of token counts on the GPU, for penalties.

The device counts what it samples. A row is written from the host only when its sequence is new here, or when it got
tokens that the device did not count.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class CountRows:
    """Sequences are told apart by the array that holds their tokens.

    Args:
        capacity: Rows on the GPU; at least as many as the sequences of a step.
    """

    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity))
        # By identity, least recently used first. The array is kept, so that no other can take its identity.
        self._rows: OrderedDict[int, tuple[np.ndarray, int, int]] = OrderedDict()

    def take(self, output: np.ndarray) -> tuple[int, bool]:
        """Return (row, whether it has to be written) for the sequence that has generated `output`.

        From here on the row is taken to count one token more: the one that is sampled now.
        """
        owner = output if output.base is None else output.base
        known = self._rows.pop(id(owner), None)
        row = known[1] if known is not None else self._new_row()
        self._rows[id(owner)] = (owner, row, len(output) + 1)
        return row, known is None or known[2] != len(output)

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        _, (_, row, _) = self._rows.popitem(last=False)
        return row
