"""The few editing steps that all passes share: make a node with its fake value, replace it, compare sizes safely."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import llmbuild.plugins.ops
import llmbuild.plugins.scaled_ops  # noqa: F401

Size = tuple[int | sympy.Expr, ...]


def is_call(node: Any, *targets: Any) -> bool:
    """Return whether `node` is a graph node that calls one of `targets`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def plain_size(sizes: Any) -> Size:
    """Return `sizes` with symbols as sympy expressions.

    Comparing SymInts directly would evaluate them on the traced example and bake the answer in as a guard;
    expressions compare by structure.
    """
    return tuple(int(s) if isinstance(s, int) or s.node.expr.is_Integer else s.node.expr for s in sizes)


def size(node: fx.Node) -> Size:
    """Return the shape of a tensor node; see `plain_size`."""
    return plain_size(node.meta["val"].shape)


def dtype(node: fx.Node) -> torch.dtype:
    result = node.meta["val"].dtype
    assert isinstance(result, torch.dtype)
    return result


def rank(node: fx.Node) -> int:
    return len(node.meta["val"].shape)


def axis(index: int, of_rank: int) -> int:
    """Return `index` as a non-negative axis."""
    return index + of_rank if index < 0 else index


def arg(node: fx.Node, index: int) -> Any:
    """Return one argument as the node holds it."""
    return node.args[index]


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return all arguments of an op call in schema order, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return tuple(node.args)
    rest = schema.arguments[len(node.args) :]
    return (*node.args, *(node.kwargs.get(arg.name, arg.default_value) for arg in rest))


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the fake mode that the graph was traced in."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise ValueError("the graph has no fake tensors: it was not made by a trace")


# Layers are alike, and a fake op on symbolic shapes takes milliseconds: each distinct call is computed once.
_PROPAGATED: WeakKeyDictionary[FakeTensorMode, dict[Any, Any]] = WeakKeyDictionary()


def propagate(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the fake value of a call, computed from those of its arguments.

    Calls of one op on the same shapes, dtypes and numbers share one value: fake values are read, never written.
    """
    known = _PROPAGATED.setdefault(mode, {})
    key = (node.target, freeze(node.args, by_value=True), freeze(node.kwargs, by_value=True))
    if key not in known:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta["val"])
        target: Any = node.target
        # Without this dispatcher some ops of torch 2.11 fix a symbolic size to that of the traced example.
        with mode, torch.no_grad(), enable_python_dispatcher():
            known[key] = target(*args, **kwargs)
    return known[key]


def freeze(value: Any, *, by_value: bool = False) -> Any:
    """Return a hashable stand-in of an argument; 1, 1.0 and True stay different.

    Args:
        by_value: Let a node stand for its shape and dtype instead of for itself.
    """
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item, by_value=by_value) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, freeze(item, by_value=by_value)) for name, item in sorted(value.items()))
    if isinstance(value, (int, float, bool)):
        return (type(value), value)
    if by_value and isinstance(value, fx.Node):
        return signature(value.meta["val"])
    return value


def signature(value: Any) -> Any:
    """Return shape and dtype of a tensor, of each tensor in a sequence, or the value of a size."""
    if isinstance(value, torch.Tensor):
        return plain_size(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(signature(item) for item in value)
    return plain_size([value])[0] if isinstance(value, (int, torch.SymInt)) else value


def call(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call just before `before` and return it, with its fake value and `before`'s stack trace."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    if "stack_trace" in before.meta:
        node.meta["stack_trace"] = before.meta["stack_trace"]
    if target is operator.getitem:
        node.meta["val"] = args[0].meta["val"][args[1]]
    else:
        node.meta["val"] = propagate(node, fake_mode_of(graph))
    return node


def replace(node: fx.Node, new: fx.Node) -> list[fx.Node]:
    """Let `new` take over all uses of `node`; erase `node` and what only it used. Returns the erased nodes."""
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return erase_unused(node)


def erase_unused(node: fx.Node) -> list[fx.Node]:
    """Erase `node` if nothing uses it, then its arguments likewise. Placeholders stay. Returns the erased nodes."""
    erased = []
    pending = [node]
    while pending:
        candidate = pending.pop()
        if candidate in erased or candidate.users or candidate.op != "call_function":
            continue
        pending.extend(candidate.all_input_nodes)
        candidate.graph.erase_node(candidate)
        erased.append(candidate)
    return erased


def tensor_operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensor arguments of `node`, each once."""
    return (arg for arg in node.all_input_nodes if is_tensor(arg))


def getitems(node: fx.Node) -> dict[int, fx.Node]:
    """Return the `getitem` users of a node with several results, by index."""
    return {int(arg(user, 1)): user for user in node.users if user.target is operator.getitem}


def describe(value: Any) -> str:
    """Return a short text of a graph value for reasons: "mul_3 aten.mul.Tensor [s0, 64] float32"."""
    if not isinstance(value, fx.Node):
        return repr(value)
    kind = value.op if value.op != "call_function" else str(value.target)
    if not is_tensor(value):
        return f"{value.name} {kind}"
    dims = ", ".join(str(dim) for dim in size(value))
    return f"{value.name} {kind} [{dims}] {str(dtype(value)).removeprefix('torch.')}"
