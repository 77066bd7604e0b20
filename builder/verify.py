"""Check a program between passes: the graph is well formed and every node's metadata is what its op gives."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from llmbuild.builder.ir import INPUT_NAMES, Program
from llmbuild.builder.passes.edit import arg, describe, fake_mode_of, freeze, plain_size, propagate, signature


class Verifier:
    """Runs after each pass. Nodes that did not change since the last check are not computed again."""

    def __init__(self) -> None:
        self.checked: dict[fx.Node, Any] = {}

    def check(self, program: Program) -> None:
        """Raise AssertionError when the graph or its metadata is wrong."""
        program.graph.lint()
        check_placeholders(program)
        mode = fake_mode_of(program.graph)
        for node in program.graph.nodes:
            if node.op != "call_function":
                continue
            values = [id(each.meta.get("val")) for each in (node, *node.all_input_nodes)]
            state = (node.target, freeze(node.args), freeze(node.kwargs), values)
            if self.checked.get(node) != state:
                check_node(node, mode)
                self.checked[node] = state


def check_placeholders(program: Program) -> None:
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    if tuple(names[: len(INPUT_NAMES)]) != INPUT_NAMES:
        raise AssertionError(f"the graph's inputs are {names[:3]}, not {INPUT_NAMES}")
    for name in INPUT_NAMES:
        if any(isinstance(dim, int) for dim in plain_size(program.placeholder(name).meta["val"].shape)):
            raise AssertionError(f"{name} has lost its symbolic size: something fixed it to the traced example's")
    if set(names[len(INPUT_NAMES) :]) != set(program.weights):
        raise AssertionError(f"placeholders and weights differ: {set(names[3:]) ^ set(program.weights)}")
    for name, expr in program.weights.items():
        value = program.placeholder(name).meta["val"]
        if plain_size(value.shape) != tuple(expr.shape) or value.dtype != expr.dtype:
            raise AssertionError(f"{name} is {tuple(value.shape)} {value.dtype}, its weight {expr.shape} {expr.dtype}")


def check_node(node: fx.Node, mode: Any) -> None:
    if "val" not in node.meta:
        raise AssertionError(f"{node.name} has no fake value")
    if node.target is operator.getitem:
        expected = arg(node, 0).meta["val"][arg(node, 1)]
    else:
        expected = propagate(node, mode)
    if signature(expected) != signature(node.meta["val"]):
        raise AssertionError(f"{describe(node)} should be {signature(expected)}")
