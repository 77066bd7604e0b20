"""When two computations that round alike agree, though one sums in another order than the other.

Sums in another order differ in their last digit, and which order is taken depends on the machine. What lies between two
8-bit numbers may then be rounded to either: that shifts its row, and those that look back at it, by a whole step. So
most rows agree closely and a few by the weight of one step; a wrong scale or order of products shows in all of them.
"""

from __future__ import annotations

import numpy as np

WORST = 0.1  # of the largest logit; 0.051 was seen with 8-bit floats on a machine with AVX-512


def row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the largest difference in each row of logits [L, V], relative to the largest logit of all."""
    errors: np.ndarray = np.abs(found - expected).max(axis=-1) / np.abs(expected).max()
    return errors


def check_rounded_alike(errors: np.ndarray, typical: float = 3e-5, worst: float = WORST) -> None:
    """Raise AssertionError unless half of the rows differ by less than `typical`, and all by less than `worst`.

    Args:
        errors: Of each row, as `row_errors` returns them.
        typical: Larger where there are so few rows that one rounded value may reach half of them.
        worst: Bound of any row.
    """
    middle, most = float(np.median(errors)), float(errors.max())
    assert middle < typical and most < worst, (
        f"half of the rows differ by {middle:.1e} at most, the worst by {most:.1e}"
    )
