"""The values that linears read: what calibration observes, and what linears that share one are treated as together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from llmbuild.builder.ir import Program
from llmbuild.builder.passes.edit import arg, is_call, size
from llmbuild.errors import ConfigError
from llmbuild.quantization.compensated import Statistics
from llmbuild.quantization.recipes import Recipe, Scheme, needs_gram

aten = torch.ops.aten


@dataclass(frozen=True)
class LinearInput:
    """A value that linears read.

    Attributes:
        key: Name in a statistics file: that of the first linear's weight in the checkpoint.
        x: The value.
        linears: Those that read it, in the order of the graph; none for what a KV cache stores.
    """

    key: str
    x: fx.Node
    linears: tuple[fx.Node, ...]

    @property
    def columns(self) -> int:
        columns = size(self.x)[-1]
        assert isinstance(columns, int)
        return columns

    def weights(self, program: Program) -> tuple[str, ...]:
        """Return the checkpoint names of the weights that read it, sorted."""
        return tuple(sorted({name for node in self.linears for name in program.weights[arg(node, 1).name].sources()}))


def linear_inputs(program: Program) -> list[LinearInput]:
    """Return all values that linears with a weight of the checkpoint read, in the order of the graph.

    A weight that several values meet belongs to none: its linears are left out.
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if is_call(node, aten.linear.default) and only_reader(program, node):
            readers.setdefault(arg(node, 0), []).append(node)
    return [
        LinearInput(min(program.weights[arg(linears[0], 1).name].sources()), x, tuple(linears))
        for x, linears in readers.items()
    ]


def only_reader(program: Program, linear: fx.Node) -> bool:
    """Whether no other linear reads the weight of this one, which is of the checkpoint."""
    weight = arg(linear, 1)
    expr = program.weight_of(weight)
    if expr is None or not expr.sources():
        return False
    return not any(is_call(user, aten.linear.default) and user is not linear for user in weight.users)


class Known(NamedTuple):
    """Where the statistics of a weight's input are."""

    statistics: Statistics
    key: str


# (program, all inputs, keys of those whose Gram matrix is needed) -> statistics of all inputs
Calibrate = Callable[[Program, Sequence[LinearInput], frozenset[str]], Statistics]


def known_inputs(
    program: Program,
    inputs: Sequence[LinearInput],
    recipe: Recipe,
    calibrated: Mapping[fx.Node, Scheme],
    calibrate: Calibrate | None,
) -> dict[fx.Node, Known]:
    """Return the statistics of what each weight of `calibrated`, by scheme, meets; weights of no input have none.

    Raises:
        ConfigError: There is no calibration.
    """
    weights = {each.key: [w for w in (arg(node, 1) for node in each.linears) if w in calibrated] for each in inputs}
    weights = {key: nodes for key, nodes in weights.items() if nodes}
    if not weights:
        return {}
    if calibrate is None:
        raise ConfigError(
            f"recipe {recipe.name!r} needs calibration",
            where="--quant",
            hint="build with BuildConfig or `llmbuild convert`, which calibrate; or take a recipe that needs none",
        )
    grams = {key for key, nodes in weights.items() if any(needs_gram(calibrated[node]) for node in nodes)}
    statistics = calibrate(program, inputs, frozenset(grams))
    return {node: Known(statistics, key) for key, nodes in weights.items() for node in nodes}
