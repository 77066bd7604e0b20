"""`f(x) => x` for everything that does nothing, and one spelling for what is written in several ways.

Identities: casts to the same dtype, contiguous, clone, alias, detach, dropout at inference, x * 1, x + 0, x / 1,
full slices, expands to the same shape, assertions, dead code.
Spellings: all casts become `to.dtype`, all reshapes `reshape` with -1 for the one symbolic size, all axis
permutations `transpose` or `permute`, all splits `split_with_sizes`.
Chains: reshape(reshape(x)), transpose(transpose(x)), squeeze(unsqueeze(x)), select(unsqueeze(x)), cat(x, empty).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite
from llmbuild.builder.passes.edit import (
    arg,
    arguments,
    axis,
    call,
    dtype,
    is_call,
    is_tensor,
    plain_size,
    rank,
    replace,
    size,
)
from llmbuild.builder.passes.matcher import CAST

aten = torch.ops.aten

CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.type_as.default)
PASS_THROUGH = (
    *CASTS,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh_copy.default,
    aten.expand.default,
    aten.slice.Tensor,
)
NEUTRAL = {
    aten.mul.Tensor: 1,
    aten.mul.Scalar: 1,
    aten.div.Tensor: 1,
    aten.add.Tensor: 0,
    aten.add.Scalar: 0,
    aten.sub.Tensor: 0,
    aten.pow.Tensor_Scalar: 1,
}
RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.ravel.default,
    aten.view_as.default,
    aten.reshape_as.default,
)
SIZE_ONLY = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims)
PERMUTES = (
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.moveaxis.int,
    aten.moveaxis.intlist,
)
SPLITS = (aten.split.Tensor, aten.split.sizes, aten.chunk.default, aten.tensor_split.sections)
ALIASES = {
    aten.concat.default: aten.cat.default,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.multiply.Scalar: aten.mul.Scalar,
    aten.divide.Tensor: aten.div.Tensor,
    aten.true_divide.Tensor: aten.div.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor,
}
SPELLED = frozenset(  # composite ops that need not be taken apart before
    (*PASS_THROUGH, *SIZE_ONLY, *PERMUTES, *SPLITS, aten.narrow.default, aten.expand_as.default)
)
_DISTINCT = (2, 3, 5, 7, 11, 13, 17, 19)  # sizes that tell axes apart


def cleanup(program: Program) -> Rewrite:
    log = Rewrite("cleanup", 0)
    log.count += drop_assertions(program.graph)
    changed = True
    while changed:
        changed = False
        gone: set[fx.Node] = set()
        for node in list(program.graph.nodes):
            if node in gone or node.op != "call_function":
                continue
            new = simpler(node)
            if new is not None:
                gone.update(replace(node, new))
                log.count += 1
                changed = True
    before = len(program.graph.nodes)
    program.graph.eliminate_dead_code()
    log.count += before - len(program.graph.nodes)
    return log


def drop_assertions(graph: fx.Graph) -> int:
    dropped = 0
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        if node.op == "call_function" and not node.users and ("assert" in name or "sym_constrain_range" in name):
            graph.erase_node(node)
            dropped += 1
    return dropped


def simpler(node: fx.Node) -> fx.Node | None:
    """Return a simpler node that equals `node`, or None."""
    if node.target is operator.getitem:
        return single_split(node)
    if node.target in ALIASES:
        return call(node, ALIASES[node.target], *node.args, **node.kwargs)
    if is_call(node, aten.cat.default):
        return simpler_cat(node)
    if is_call(node, aten.expand_as.default):
        return simpler_expansion(node)
    source = arg(node, 0) if node.args else None
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return None
    if is_tensor(node) and size(node) == size(source) and dtype(node) == dtype(source) and is_identity(node, source):
        return source
    if node.target in SIZE_ONLY:
        return simpler_reshape(node)
    if node.target in PERMUTES:
        return simpler_permute(node)
    if node.target in CASTS and node.target is not CAST:
        return call(node, CAST, source, dtype(node))
    if node.target in SPLITS:
        return simpler_split(node, source)
    if is_call(node, aten.narrow.default):
        _, dim, start, length = arguments(node)
        if isinstance(start, int) and isinstance(length, int) and start >= 0:
            return call(node, aten.slice.Tensor, source, dim, start, start + length)
    selects_new_axis = (
        is_call(node, aten.select.int)
        and is_call(source, aten.unsqueeze.default)
        and axis(arg(node, 1), rank(source)) == axis(arg(source, 1), rank(source))
    )
    return arg(source, 0) if selects_new_axis else None


def is_identity(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node`, of its source's shape and dtype, also has its source's values."""
    if node.target in PASS_THROUGH or node.target in SIZE_ONLY:
        return not is_call(node, aten.slice.Tensor) or arguments(node)[4] == 1
    if is_call(node, aten.dropout.default):
        return arg(node, 2) is False or arg(node, 1) == 0
    if node.target in NEUTRAL:
        other = arg(node, 1)
        plain = all(extra in (1, None) for extra in arguments(node)[2:])
        return isinstance(other, (int, float)) and other == NEUTRAL[node.target] and plain
    if node.target in PERMUTES:
        return permutation(node) == list(range(rank(node)))
    return False


def simpler_expansion(node: fx.Node) -> fx.Node | None:
    """f(expand_as(x, y), y) => f(x, y) for elementwise f, which expands x by itself."""
    for user in node.users:
        others = [item for item in user.all_input_nodes if item is not node and is_tensor(item)]
        pointwise = torch.Tag.pointwise in getattr(user.target, "tags", ())
        if not pointwise or not any(size(item) == size(node) for item in others):
            return None
    return arg(node, 0)


def simpler_reshape(node: fx.Node) -> fx.Node | None:
    """reshape(reshape(x, a), b) => reshape(x, b), or x when it ends with the shape it began with."""
    base: Any = arg(node, 0)
    while base.target in SIZE_ONLY:
        base = arg(base, 0)
    if size(base) == size(node):
        return base
    if node.target not in RESHAPES:
        return None
    shape = static_shape(node)
    if base is arg(node, 0) and is_call(node, aten.reshape.default) and (shape is None or list(arg(node, 1)) == shape):
        return None
    if shape is None and node.target not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return None
    return call(node, aten.reshape.default, base, list(arg(node, 1)) if shape is None else shape)


def static_shape(node: fx.Node) -> list[int] | None:
    """Return the node's shape with its one symbolic size as -1, or None when it has several."""
    sizes = size(node)
    if sum(not isinstance(dim, int) for dim in sizes) > 1:
        return None
    return [dim if isinstance(dim, int) else -1 for dim in sizes]


def permutation(node: fx.Node) -> list[int]:
    """Return the source axis of each axis of a node of PERMUTES, read off what the op does to distinct sizes."""
    sizes = _DISTINCT[: rank(node)]
    result = node.target(torch.empty(sizes, device="meta"), *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return [sizes.index(size) for size in result.shape]


def simpler_permute(node: fx.Node) -> fx.Node | None:
    """permute(permute(x, a), b) => permute(x, a∘b), written as a transpose when it swaps two axes."""
    source: Any = arg(node, 0)
    order = permutation(node)
    if source.target in PERMUTES:
        inner = permutation(source)
        order = [inner[dim] for dim in order]
        source = arg(source, 0)
        if order == list(range(len(order))):
            return source
    moved = [dim for dim, origin in enumerate(order) if dim != origin]
    if len(moved) == 2:
        if is_call(node, aten.transpose.int) and source is arg(node, 0) and list(node.args[1:]) == moved:
            return None
        return call(node, aten.transpose.int, source, *moved)
    if is_call(node, aten.permute.default) and source is arg(node, 0):
        return None
    return call(node, aten.permute.default, source, order)


def simpler_split(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """split(x, 64) and chunk(x, 2) => split_with_sizes(x, [64, 64]), where the sizes are static."""
    dim = axis(arguments(node)[2], rank(source))
    sizes = [plain_size(part.shape)[dim] for part in node.meta["val"]]
    if not all(isinstance(each, int) for each in sizes):
        return None
    return call(node, aten.split_with_sizes.default, source, sizes, dim - rank(source))


def single_split(node: fx.Node) -> fx.Node | None:
    """getitem(split(x, [everything]), 0) => x; getitem(broadcast_tensors([x, y]), 1) => y of that shape already."""
    split: Any = arg(node, 0)
    if is_call(split, aten.broadcast_tensors.default):
        source: fx.Node = arg(split, 0)[arg(node, 1)]
        return source if size(source) == size(node) else None
    if is_call(split, aten.split_with_sizes.default) and len(arg(split, 1)) == 1:
        return arg(split, 0)
    return None


def simpler_cat(node: fx.Node) -> fx.Node | None:
    """cat(x, empty) => x: a rotation of all channels still joins those that it passes, of which there are none."""
    parts: Any = arg(node, 0)
    dim = axis(arguments(node)[1], rank(node))
    filled = [part for part in parts if rank(part) == rank(node) and size(part)[dim] != 0]
    if len(filled) == 1 and dtype(filled[0]) == dtype(node):
        return filled[0]
    return None if len(filled) == len(parts) or not filled else call(node, aten.cat.default, filled, dim - rank(node))
