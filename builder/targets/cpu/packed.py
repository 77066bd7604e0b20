"""The target's own pass, for engines with native operators: use a merged linear's output in one piece.

paged_attention(q, a, b, .., s, t) with a, s = cache_int8(k), b, t = cache_int8(v)  =>  paged_attention_int8(q, k, v)
paged_attention(rope(q), rope(k), v) with q, k, v = split(x)  =>  packed_attention(x, cos, sin)
gated_activation(gate, up)           with gate, up = split(x) =>  packed_gated_activation(x)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import Program, Rewrite
from llmbuild.builder.passes.edit import arguments, axis, call, is_call, rank, replace, size
from llmbuild.builder.targets.cpu import ops  # noqa: F401  (registers the ops)

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
native = torch.ops.llmbuild_cpu
NATIVE_ACTIVATIONS = ("silu", "gelu_tanh")


def packed(program: Program, *, attention: bool) -> Rewrite:
    """Apply both rules in place; without `attention` only the second."""
    log = Rewrite("cpu_packed", append_in_int8(program) if attention else 0)
    for node in list(program.graph.nodes):
        if attention and is_call(node, llmbuild.paged_attention.default, native.paged_attention_int8.default):
            new = packed_attention(node)
        elif is_call(node, llmbuild.gated_activation.default):
            new = packed_gated_activation(node)
        else:
            continue
        if isinstance(new, str):
            log.declined.append(f"{node.name}: {new}")
        else:
            replace(node, new)
            log.count += 1
    program.graph.eliminate_dead_code()
    return log


def append_in_int8(program: Program) -> int:
    """Let attention round what it appends; returns how often."""
    count = 0
    for node in program.graph.find_nodes(op="call_function", target=llmbuild.paged_attention.default):
        q, k, v, *rest, k_scale, _ = arguments(node)
        if k_scale is not None:
            k, v = (x.args[0].args[0] for x in (k, v))  # cache_int8's
            replace(node, call(node, native.paged_attention_int8.default, q, k, v, *rest))
            count += 1
    return count


def packed_attention(node: fx.Node) -> fx.Node | str:
    q, k, v, layer, scale, window, softcap, sinks, slopes, *_ = arguments(node)
    int8 = is_call(node, native.paged_attention_int8.default)
    turned = [is_call(x, llmbuild.rope.default) for x in (q, k)]
    cos, sin, interleaved = None, None, False
    if any(turned):
        tables = {arguments(x)[1:] for x in (q, k) if is_call(x, llmbuild.rope.default)}
        if not all(turned) or len(tables) != 1:
            return "q and k are rotated differently"
        cos, sin, interleaved = tables.pop()
        if rank(cos) != 2:
            return f"cos has {rank(cos)} axes"
        q, k = q.args[0], k.args[0]
    merged = one_split([heads_of(x) for x in (q, k, v)])
    if merged is None:
        return "q, k and v are not the parts of one linear"
    heads = [int(size(x)[1]) for x in (q, k)]
    widths = [int(size(x)[2]) for x in (q, v)]
    return call(
        node,
        native.packed_attention.default,
        *(merged, cos, sin, interleaved, *heads, *widths, layer, scale, window, softcap, sinks, slopes, int8),
    )


def packed_gated_activation(node: fx.Node) -> fx.Node | str:
    gate, up, activation = node.args
    if activation not in NATIVE_ACTIVATIONS:
        return f"no native {activation}"
    merged = one_split([gate, up])
    if merged is None:
        return "gate and up are not the halves of one linear"
    return call(node, native.packed_gated_activation.default, merged, activation)


def heads_of(x: Any) -> Any:
    """Return the [T, H·D] value that x [T, H, D] is a view of."""
    if is_call(x, aten.reshape.default, aten.view.default) and rank(x) == 3 and rank(x.args[0]) == 2:
        return x.args[0]
    return None


def one_split(parts: list[Any]) -> fx.Node | None:
    """Return the value whose split along the last axis gives exactly `parts`, in order, or None."""
    sources = {part.args[0] if is_call(part, operator.getitem) else None for part in parts}
    source = sources.pop()
    if sources or source is None or not is_call(source, aten.split_with_sizes.default):
        return None
    whole, widths, dim = arguments(source)
    if len(widths) != len(parts) or [part.args[1] for part in parts] != list(range(len(parts))):
        return None
    return whole if axis(dim, rank(whole)) == rank(whole) - 1 else None
