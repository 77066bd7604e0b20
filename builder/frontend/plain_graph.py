"""Exported program → plain FX graph: inputs first, then one placeholder per parameter or buffer that is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from llmbuild.builder.ir import INPUT_NAMES
from llmbuild.errors import UnsupportedError

PREFIX = "model."  # the exported module holds the model under this name


def plain_graph(exported: torch.export.ExportedProgram) -> tuple[fx.Graph, dict[str, str], dict[str, Tensor]]:
    """Copy the exported graph without guards and asserts.

    Returns:
        The graph; placeholder name -> name in the model; placeholder name -> value of literals in the model's code.

    Raises:
        UnsupportedError: the graph holds more than calls of ops, or a literal whose value is not known.
    """
    source = exported.graph
    _drop_guards(source)
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    placeholders = [node for node in source.nodes if node.op == "placeholder"]
    inputs = [node for node in placeholders if specs[node.name].kind is InputKind.USER_INPUT]
    stored = [node for node in placeholders if node not in inputs and node.users]

    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    names: dict[str, str] = {}
    literals: dict[str, Tensor] = {}
    for node, name in zip(inputs, INPUT_NAMES, strict=True):
        copied[node] = _placeholder(graph, name, node)
    for node in stored:
        target = specs[node.name].target
        assert target is not None
        new = copied[node] = _placeholder(graph, target.removeprefix(PREFIX).replace(".", "_"), node)
        if specs[node.name].kind is InputKind.CONSTANT_TENSOR:
            literals[new.name] = _real_literal(exported.constants[target], target)
        else:
            names[new.name] = target.removeprefix(PREFIX)
    for node in source.nodes:
        if node.op == "call_function":
            copied[node] = graph.node_copy(node, lambda argument: copied[argument])
        elif node.op == "output":
            graph.output(copied[node.args[0][0]])
        elif node.op != "placeholder":
            raise UnsupportedError(f"the exported graph holds a {node.op} node ({node.target})", where=node.name)
    graph.lint()
    return graph, names, literals


def _drop_guards(graph: fx.Graph) -> None:
    """Erase guards and asserts, then everything that only they used."""
    for node in list(graph.nodes):
        if any(word in str(node.target) for word in ("_guards", "_assert", "sym_constrain")) and not node.users:
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _placeholder(graph: fx.Graph, name: str, source: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = source.meta["val"]
    return node


def _real_literal(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor) or isinstance(value, torch._subclasses.FakeTensor):
        raise UnsupportedError(f"the value of the literal {name!r} in the model's code is not known at build time")
    return value.detach().clone()
