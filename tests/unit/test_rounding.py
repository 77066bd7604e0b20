"""The bounds on rows of logits that were rounded to 8 bits by two computations."""

from __future__ import annotations

import numpy as np
import pytest

from support.rounding import check_rounded_alike, row_errors


def test_errors_are_those_of_rows_relative_to_the_largest_logit() -> None:
    expected = np.array([[1.0, -4.0], [2.0, 0.0], [0.0, 0.0]])
    found = np.array([[1.0, -3.0], [2.0, 0.0], [0.4, 0.2]])
    np.testing.assert_allclose(row_errors(found, expected), [0.25, 0.0, 0.1])


def test_a_few_rows_may_be_off_by_a_step_and_not_by_more() -> None:
    check_rounded_alike(np.array([1e-6, 2e-6, 1e-6, 0.05, 0.02]))
    for errors in ([1e-6, 1e-6, 0.11], [1e-6, 0.05, 0.02], [1e-6, 1e-6, float("nan")]):
        with pytest.raises(AssertionError, match="half of the rows differ by"):
            check_rounded_alike(np.array(errors))
