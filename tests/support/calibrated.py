"""Programs of tiny models as `choose_formats` gets them, and statistics of them held in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmbuild.builder.calibrate import calibrate
from llmbuild.builder.ir import Program
from llmbuild.builder.passes.linear_inputs import Calibrate, LinearInput, linear_inputs
from llmbuild.builder.pipeline import phases
from llmbuild.quantization.calibration.statistics import InputStatistics
from llmbuild.quantization.recipes import find_recipe

Windows = Sequence[Sequence[int]]


def before_formats(program: Program) -> Program:
    """Run all passes that come before the weights' formats are chosen over a traced program, and return it."""
    for name, apply in phases(find_recipe("none")):
        if name == "choose_formats":
            return program
        apply(program)
    raise AssertionError("there is no pass that chooses formats")


def statistics_of(
    program: Program, windows: Windows, inputs: Sequence[LinearInput] | None = None
) -> dict[str, InputStatistics]:
    """Calibrate a program, with the Gram matrices of all inputs."""
    inputs = linear_inputs(program) if inputs is None else inputs
    found: dict[str, InputStatistics] = {}
    calibrate(program, windows, inputs, grams=[each.key for each in inputs], write=found.__setitem__)
    return found


class KnownRows:
    """Statistics of an input of which all rows are known."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def gram(self, key: str) -> torch.Tensor:
        raise AssertionError("no search needs the Gram matrix")

    def mean(self, key: str) -> torch.Tensor:
        return self.x.abs().double().mean(0)

    def absmax(self, key: str) -> torch.Tensor:
        return self.x.abs().amax(0)

    def sample(self, key: str) -> torch.Tensor:
        return self.x


class Held:
    """Statistics by key."""

    def __init__(self, found: dict[str, InputStatistics]) -> None:
        self.found = found

    def gram(self, key: str) -> torch.Tensor:
        gram = self.found[key].gram
        assert gram is not None
        return gram

    def mean(self, key: str) -> torch.Tensor:
        return self.found[key].mean

    def absmax(self, key: str) -> torch.Tensor:
        return self.found[key].absmax

    def sample(self, key: str) -> torch.Tensor:
        return self.found[key].sample.rows


def gathered(windows: Windows) -> Calibrate:
    """Return what `choose_formats` calls for statistics."""
    return lambda program, inputs, needed: Held(statistics_of(program, windows, inputs))
