"""Does an op mix tokens? Decided from shapes: the packed token axis is the one whose size depends on the symbol T."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
# Ops that run along a sequence by nature.
_SEQUENTIAL = ("conv", "cumsum", "cumprod", "cummax", "logcumsumexp", "lstm", "gru", "rnn", "scaled_dot_product")
# op -> position of its axis (or list of axes) argument
_REDUCTIONS = {
    "sum": 1,
    "mean": 1,
    "amax": 1,
    "amin": 1,
    "max": 1,
    "min": 1,
    "var": 1,
    "std": 1,
    "prod": 1,
    "any": 1,
    "all": 1,
    "argmax": 1,
    "argmin": 1,
    "softmax": 1,
    "_softmax": 1,
    "log_softmax": 1,
    "logsumexp": 1,
    "linalg_vector_norm": 2,
    "sort": 1,
    "topk": 2,
    "flip": 1,
    "roll": 2,
}
_SELECTIONS = {"slice": 1, "select": 1, "index_select": 1, "gather": 1, "narrow": 1}
_CONTRACTIONS = ("matmul", "bmm", "mm", "linear", "addmm", "baddbmm", "dot", "mv")


def mixes(node: fx.Node, tokens: Any, allowed_index: fx.Node) -> str | None:
    """Return why `node` lets one token see another, or None if every token's result depends on that token alone.

    Args:
        node: A call_function node with fake tensors in its arguments' metadata.
        tokens: The symbolic size of the token axis.
        allowed_index: Indexing the token axis with this node is legal (the rows whose logits are wanted).
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name.removeprefix("aten::")
    if name.startswith("arange") and any(_depends(_size(argument), tokens) for argument in node.args):
        return "counts tokens; positions must come from position_ids"
    if name == "einsum":
        return "contracts the token axis" if _contracts(name, node, tokens) else None
    operand = node.args[0] if node.args else None
    axes = _token_axes(operand, tokens)
    if not axes:
        return None
    if any(name.lstrip("_").startswith(word) for word in _SEQUENTIAL):
        # a running sum over another axis (a router's, say) is harmless
        if name.startswith("cum") and _axes(node, 1, operand).isdisjoint(axes):
            return None
        return "runs along the sequence"
    if name in _REDUCTIONS and not _axes(node, _REDUCTIONS[name], operand).isdisjoint(axes):
        return "reduces or reorders the token axis"
    if name in _SELECTIONS and not _axes(node, _SELECTIONS[name], operand).isdisjoint(axes):
        whole = name == "slice" and _whole_slice(node)
        picked = name == "index_select" and node.args[2] is allowed_index
        return None if whole or picked else "takes a part of the token axis"
    if name == "index":
        indices = node.args[1]
        assert isinstance(indices, Sequence)
        hit = [index for axis, index in enumerate(indices) if index is not None and axis in axes]
        return None if all(index is allowed_index for index in hit) else "indexes the token axis"
    if name in _CONTRACTIONS and _contracts(name, node, tokens):
        return "contracts the token axis"
    if name.endswith("pad") or name in ("unfold", "scatter", "index_put", "index_add", "masked_scatter"):
        out = node.meta["val"].shape
        if any(_depends(size, tokens) and str(size) != str(tokens) for size in out):
            return "lengthens or shifts the token axis"
    return None


def _size(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _depends(size: Any, tokens: Any) -> bool:
    if not isinstance(size, torch.SymInt):
        return False
    return bool(size.node.expr.free_symbols & tokens.node.expr.free_symbols)


def _token_axes(operand: Any, tokens: Any) -> set[int]:
    if isinstance(operand, list | tuple) and operand:
        operand = operand[0]
    value = _size(operand)
    if not isinstance(value, Tensor):
        return set()
    return {axis for axis, size in enumerate(value.shape) if _depends(size, tokens)}


def _axes(node: fx.Node, position: int, operand: Any) -> set[int]:
    """Axes that a reduction or selection names, as non-negative numbers; all of them when it names none."""
    rank = _size(operand).ndim
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if len(node.args) > position:
        given: Any = node.args[position]
    elif position < len(names) and names[position] in node.kwargs:
        given = node.kwargs[names[position]]
    else:
        declared = node.target._schema.arguments  # type: ignore[union-attr]
        given = declared[position].default_value if position < len(declared) else None
    if given is None or given == []:
        return set(range(rank))
    listed = given if isinstance(given, list | tuple) else [given]
    return {axis % rank for axis in listed if isinstance(axis, int)}


def _whole_slice(node: fx.Node) -> bool:
    start = node.args[2] if len(node.args) > 2 else None
    end = node.args[3] if len(node.args) > 3 else None
    step = node.args[4] if len(node.args) > 4 else 1
    unbounded = end is None or (isinstance(end, int) and end > 1 << 40)
    return not isinstance(start, fx.Node) and not start and unbounded and step in (None, 1)


def _contracts(name: str, node: fx.Node, tokens: Any) -> bool:
    """Whether a product sums over the token axis: the last axis of its left factor, or a letter einsum drops."""
    if name == "einsum":
        equation, operands = node.args[0], node.args[1]
        assert isinstance(equation, str) and isinstance(operands, Sequence)
        inputs, _, output = equation.replace(" ", "").replace("...", "").partition("->")
        return any(
            letter not in output
            for letters, operand in zip(inputs.split(","), operands, strict=True)
            for letter, size in zip(reversed(letters), reversed(_size(operand).shape), strict=False)
            if _depends(size, tokens)
        )
    left = node.args[1] if name in ("addmm", "baddbmm") else node.args[0]
    value = _size(left)
    return isinstance(value, Tensor) and value.ndim > 0 and _depends(value.shape[-1], tokens)
