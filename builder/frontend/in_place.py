"""`y.div_(z) => y' = div(y, z)`, and later reads of y read y': in-place ops on values that nothing else aliases.

`ExportedProgram.run_decompositions({})` does this for every program, by tracing all of the model once more; routers of
mixtures (`scores /= scores.sum()`) would pay for that with half of their tracing time.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload


def mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_composite_view(node: fx.Node) -> bool:
    """Whether a call is a view that torch defines by other ops (`x.T`, `x.broadcast_to(sizes)`)."""
    if not isinstance(node.target, OpOverload) or not aliases(node):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), "CompositeImplicitAutograd")


def make_functional(graph: fx.Graph) -> bool:
    """Rewrite all in-place ops of `graph`, or none. Returns whether the graph is functional now."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    in_place = [node for node in graph.nodes if mutates(node)]
    rewritten: set[fx.Node] = set()
    for node in in_place:
        if counterpart(node) is None or not alone(node, rewritten, places):
            return False
        rewritten.add(node)
    for node in in_place:
        base, functional = node.args[0], counterpart(node)
        assert isinstance(base, fx.Node) and functional is not None
        with graph.inserting_after(node):
            new = graph.call_function(functional, node.args, node.kwargs)
        new.meta = dict(node.meta)
        place = places[new] = places[node]
        node.replace_all_uses_with(new)
        for user in [user for user in base.users if places[user] > place]:
            user.replace_input_with(base, new)
        graph.erase_node(node)
    return True


def counterpart(node: fx.Node) -> OpOverload | None:
    """Return the op that computes what an in-place op writes, in the same dtype and shape, or None."""
    assert isinstance(node.target, OpOverload)
    namespace, name = node.target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overload = getattr(packet, node.target._overloadname, None)
    arguments = node.target._schema.arguments
    written_to = [place for place, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write]
    if (
        not name.endswith("_")
        or written_to != [0]
        or not isinstance(overload, OpOverload)
        or overload._schema.is_mutable
    ):
        return None
    if [argument.name for argument in overload._schema.arguments] != [argument.name for argument in arguments]:
        return None
    written: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta["val"])
    with written.fake_mode:
        result = overload(*args, **kwargs)
    same = isinstance(result, Tensor) and result.dtype == written.dtype and result.ndim == written.ndim
    return overload if same else None


def alone(node: fx.Node, rewritten: set[fx.Node], places: dict[fx.Node, int]) -> bool:
    """Whether the value that `node` writes to is its own, and no view of it was taken before."""
    base = node.args[0]
    while base in rewritten:  # y.mul_(a).add_(b)
        base = base.args[0]  # type: ignore[union-attr]
    if not isinstance(base, fx.Node) or base.op != "call_function" or aliases(base):
        return False
    family = [base, *(each for each in rewritten if root(each, rewritten) is base)]
    earlier = (user for member in family for user in member.users if places[user] < places[node])
    return not any(aliases(user) for user in earlier if user not in rewritten)


def root(node: fx.Node, rewritten: set[fx.Node]) -> Any:
    while node in rewritten:
        node = node.args[0]  # type: ignore[assignment]
    return node


def aliases(node: fx.Node) -> bool:
    """Whether a call may return memory of one of its arguments. What is not known to be fresh counts as such."""
    if node.target is operator.getitem:
        source = node.args[0]
        return not isinstance(source, fx.Node) or aliases(source)
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
    return any(result.alias_info is not None for result in node.target._schema.returns)
