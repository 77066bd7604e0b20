"""The accuracy of choices on text that no sensitivity was measured on: real figures, of the program that is built."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmbuild.builder.accuracy.measures import Comparison, Figures, rows_a_step
from llmbuild.builder.accuracy.quantized import HELD_BYTES, weight_bytes
from llmbuild.builder.accuracy.walk import Runner
from llmbuild.builder.accuracy.windows import BLOCK_SIZE, WINDOW, Window, steps
from llmbuild.builder.ir import Program

KEPT_BYTES = 1 << 30  # of the reference's logits; more are computed anew for each choice


class HeldOut:
    """Compares programs with the unquantized one.

    Args:
        reference: The unquantized program, as a target gets it.
        windows: Of the text.
    """

    def __init__(self, reference: Program, windows: Sequence[Window]) -> None:
        self.windows = windows
        self.tokens = sum(map(len, windows))
        self._chunk = rows_a_step(reference.info.vocab_size, WINDOW)
        self._hold = 2 * weight_bytes(reference) <= HELD_BYTES
        self._reference = Runner(reference, hold=self._hold)
        self._keep = 4 * self.tokens * reference.info.vocab_size <= KEPT_BYTES
        self._kept: dict[tuple[int, int], npt.NDArray[np.float32]] = {}

    def figures(self, candidate: Program) -> Figures:
        """Run a program over the text and compare it.

        Raises:
            AccuracyError: Logits are no distribution.
        """
        runner, comparison = Runner(candidate, hold=self._hold), Comparison()
        for number, window in enumerate(self.windows):
            for part, (step, targets) in enumerate(steps(window, chunk=self._chunk, block_size=BLOCK_SIZE)):
                exact = self._kept.get((number, part))
                if exact is None:
                    exact = self._reference.forward(step)
                    if self._keep:
                        self._kept[number, part] = exact
                comparison.add(exact, runner.forward(step), targets)
        return comparison.figures()
