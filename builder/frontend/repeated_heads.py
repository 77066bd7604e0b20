"""Heads that a model repeats for grouped attention, undone: `x[:, ::group]` for x [T, Hkv · group, D], with the proof.

Models that write attention out repeat keys and values up to the number of query heads, often before they rotate them.
Only one head of each group needs to be computed and cached:

    reshape(expand(x[.., Hkv, 1, ..]))     => x
    repeat_interleave(x, group)            => x
    f(repeat(x)), f elementwise or on other axes => repeat(f(x))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.passes.edit import arguments, axis, call, is_tensor, rank, size

aten = torch.ops.aten

SAME = (aten.to.dtype, aten.contiguous.default, aten.clone.default, aten._to_copy.default, aten.type_as.default)
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints)


def one_of_each(before: fx.Node, x: fx.Node) -> fx.Node:
    """Return x [T, H, D] with one head of each group of repeated heads; x itself when they are not proven to repeat."""
    found = shrink(before, x, 1)
    return x if found is None else found


def shrink(before: fx.Node, x: fx.Node, at: int) -> fx.Node | None:
    """Return x without the repeats along axis `at`, made just before `before`, or None."""
    if x.op != "call_function" or not is_tensor(x):
        return None
    heads = size(x)[at]
    if x.target in RESHAPES:
        return shrink_reshape(before, x, at)
    if x.target is aten.repeat_interleave.self_int:
        source, repeats, dim = arguments(x)[:3]
        return source if dim is not None and axis(dim, rank(source)) == at and isinstance(repeats, int) else None
    if x.target in SAME:
        return again(before, x, {x.args[0]: shrink(before, x.args[0], at)})  # type: ignore[arg-type]
    if x.target is aten.permute.default:
        order = [axis(dim, rank(x)) for dim in x.args[1]]  # type: ignore[union-attr, arg-type]
        return again(before, x, {x.args[0]: shrink(before, x.args[0], order[at])})  # type: ignore[arg-type]
    if x.target is aten.transpose.int:
        a, b = (axis(dim, rank(x)) for dim in x.args[1:3])  # type: ignore[arg-type]
        source_at = {a: b, b: a}.get(at, at)
        return again(before, x, {x.args[0]: shrink(before, x.args[0], source_at)})  # type: ignore[arg-type]
    if x.target is aten.select.int:
        source, dim = x.args[0], axis(x.args[1], rank(x) + 1)  # type: ignore[arg-type]
        return again(before, x, {source: shrink(before, source, at + (dim <= at))})  # type: ignore[arg-type]
    if x.target is aten.slice.Tensor:
        source, dim = x.args[0], axis(arguments(x)[1], rank(x))
        return None if dim == at else again(before, x, {source: shrink(before, source, at)})  # type: ignore[arg-type]
    if x.target is aten.cat.default:
        parts, dim = arguments(x)[:2]
        if axis(dim, rank(x)) == at:
            return None
        return again(before, x, {part: shrink(before, part, at) for part in parts})
    if torch.Tag.pointwise in getattr(x.target, "tags", ()):
        inner: dict[Any, fx.Node | None] = {}
        for item in x.all_input_nodes:
            offset = rank(x) - rank(item)
            if at - offset >= 0 and size(item)[at - offset] == heads and heads != 1:
                inner[item] = shrink(before, item, at - offset)
        return again(before, x, inner) if inner else None
    return None


def shrink_reshape(before: fx.Node, x: fx.Node, at: int) -> fx.Node | None:
    source: Any = x.args[0]
    have, want = size(source), size(x)
    if have == want:
        return again(before, x, {source: shrink(before, source, at)}, keep_shape=False)
    # [.., Hkv, group, ..] => [.., Hkv · group, ..]
    if have[:at] != want[:at] or have[at + 2 :] != want[at + 1 :] or source.target is not aten.expand.default:
        return None
    base: Any = source.args[0]
    if rank(base) != rank(source) or size(base)[at + 1] != 1 or size(base)[: at + 1] != have[: at + 1]:
        return None
    return call(before, aten.squeeze.dim, base, at + 1)


def again(before: fx.Node, x: fx.Node, inner: dict[Any, fx.Node | None], *, keep_shape: bool = True) -> fx.Node | None:
    """The call `x` on smaller operands; just the operand when it was a reshape to the same shape."""
    if any(new is None for new in inner.values()):
        return None
    if not keep_shape:
        return next(iter(inner.values()))
    args, kwargs = fx.node.map_arg((x.args, dict(x.kwargs)), lambda item: inner.get(item, item))
    return call(before, x.target, *args, **kwargs)
