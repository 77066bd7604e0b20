"""`softmax(f(q·kᵀ))·v ⇒ paged_attention(q, k, v)`: attention that a model writes out instead of calling the interface.

Such a model is traced as it is, masks included. In the graph, every softmax over a token axis stands between a product
q·kᵀ and a product with v; `score_function.py` finds out what happens to the scores in between, by running it. The op
takes over, and masks and biases fall away with all that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmbuild.builder.frontend.repeated_heads import one_of_each
from llmbuild.builder.frontend.score_function import ScoreFunction, ScoreRule, recognise, takes_shape_only
from llmbuild.builder.ir import source_line
from llmbuild.builder.passes.edit import arguments, axis, call, dtype, fake_mode_of, is_call, rank, replace, size
from llmbuild.builder.passes.matcher import strip_casts
from llmbuild.errors import UnsupportedError

aten = torch.ops.aten

PRODUCTS = (aten.matmul.default, aten.bmm.default)
SOFTMAXES = (aten.softmax.int, aten._softmax.default)
# What may stand between the softmax and its product with v: nothing that changes a weight.
CARRIERS = (
    aten.to.dtype,
    aten.type_as.default,
    aten._to_copy.default,
    aten.dropout.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.clone.default,
    aten.contiguous.default,
)


@dataclass(frozen=True)
class Captured:
    """count: attention ops made. slopes: literals to add, by placeholder name. notices: facts for the report."""

    count: int
    slopes: dict[str, Tensor]
    notices: list[str]


def capture(
    graph: fx.Graph, value: Callable[[str], Tensor], *, windows: tuple[int, ...] = (), longest: int = 1 << 20
) -> Captured:
    """Replace all attention that is written out in `graph`, in place; layers are numbered in the graph's order.

    Args:
        graph: A plain traced graph.
        value: Returns the real value of a buffer or literal placeholder, by its name.
        windows: Window sizes that the config mentions.
        longest: Most tokens that the model can take.

    Raises:
        UnsupportedError: Attention that the op cannot represent, with the source line.
    """
    spell_out(graph)
    tokens = next(node for node in graph.nodes if node.name == "input_ids").meta["val"].shape[0]
    active = activations(graph)
    captured = Captured(0, {}, [])
    for softmax in [node for node in graph.nodes if is_over_tokens(node, tokens)]:
        product = score_product(softmax, active, tokens)
        output = value_product(softmax)
        function = ScoreFunction(product, softmax.args[0], tokens, value)
        try:
            rule = recognise(function, windows, longest)
        except UnsupportedError as error:
            raise UnsupportedError(error.what, where=source_line(softmax), hint=error.hint) from error
        captured = attend(graph, product, output, rule, captured)
    if captured.count:
        graph.eliminate_dead_code()
        drop_unused_placeholders(graph)
    return captured


def spell_out(graph: fx.Graph) -> None:
    """baddbmm(b, q, kᵀ) => β·b + α·(q·kᵀ), and scaled_dot_product_attention => its definition."""
    for node in list(graph.nodes):
        if is_call(node, aten.baddbmm.default):
            bias, left, right = node.args[:3]
            beta, alpha = (arguments(node)[i] for i in (3, 4))
            scores = call(node, aten.mul.Scalar, call(node, aten.bmm.default, left, right), alpha)
            replace(node, call(node, aten.add.Tensor, scores, call(node, aten.mul.Scalar, bias, beta)))
        elif is_call(node, aten.scaled_dot_product_attention.default):
            spell_out_sdpa(node)


def spell_out_sdpa(node: fx.Node) -> None:
    q, k, v, mask, dropout, causal, scale, gqa = arguments(node)
    if dropout:
        raise UnsupportedError("attention drops out weights at inference", where=source_line(node))
    if gqa:
        group = size(q)[-3] // size(k)[-3]
        k, v = (call(node, aten.repeat_interleave.self_int, x, group, rank(x) - 3) for x in (k, v))
    scores = call(node, aten.matmul.default, q, call(node, aten.transpose.int, k, rank(k) - 2, rank(k) - 1))
    scores = call(node, aten.mul.Scalar, scores, size(q)[-1] ** -0.5 if scale is None else scale)
    if causal:
        ones = call(node, aten.ones_like.default, scores)
        upper = call(node, aten.triu.default, call(node, aten.mul.Scalar, ones, torch.finfo(dtype(scores)).min), 1)
        scores = call(node, aten.add.Tensor, scores, upper)
    if mask is not None and dtype(mask) is torch.bool:
        hidden = call(node, aten.logical_not.default, mask)
        scores = call(node, aten.masked_fill.Scalar, scores, hidden, torch.finfo(dtype(scores)).min)
    elif mask is not None:
        scores = call(node, aten.add.Tensor, scores, mask)
    weights = call(node, aten.softmax.int, scores, -1)
    replace(node, call(node, aten.matmul.default, weights, v))


def activations(graph: fx.Graph) -> set[fx.Node]:
    """All nodes whose values, not only shapes, depend on the values of `input_ids`."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name == "input_ids":
                found.add(node)
        elif isinstance(node.meta.get("val"), Tensor | tuple | list):
            inputs = node.all_input_nodes
            values = [item for item in inputs if not (takes_shape_only(node) and item is node.args[0])]
            if any(item in found for item in values):
                found.add(node)
    return found


def is_tokens(dim: Any, tokens: torch.SymInt) -> bool:
    return isinstance(dim, torch.SymInt) and dim.node.expr == tokens.node.expr


def is_over_tokens(node: fx.Node, tokens: torch.SymInt) -> bool:
    if not is_call(node, *SOFTMAXES):
        return False
    shape = node.meta["val"].shape
    over_last = axis(arguments(node)[1], len(shape)) == len(shape) - 1
    return len(shape) >= 3 and over_last and is_tokens(shape[-1], tokens) and is_tokens(shape[-2], tokens)


def score_product(softmax: fx.Node, active: set[fx.Node], tokens: torch.SymInt) -> fx.Node:
    """The one product of activations that the softmax's input is computed from."""
    found: dict[fx.Node, None] = {}
    pending, seen = [softmax.args[0]], set()
    while pending:
        node: Any = pending.pop()
        if node in seen or node not in active:
            continue
        seen.add(node)
        if is_call(node, *PRODUCTS):
            found[node] = None
        else:
            pending += node.all_input_nodes
    if len(found) != 1 or not is_tokens(next(iter(found)).meta["val"].shape[-2], tokens):
        raise UnsupportedError(
            f"a softmax over tokens of {len(found)} products, where attention has one, q·kᵀ", where=source_line(softmax)
        )
    return next(iter(found))


def value_product(softmax: fx.Node) -> fx.Node:
    """The product of the softmax's weights and v."""
    node = softmax
    while True:
        users = list(node.users)
        if len(users) != 1:
            raise UnsupportedError("attention weights are used more than once", where=source_line(softmax))
        if is_call(users[0], *PRODUCTS) and users[0].args[0] is node:
            return users[0]
        if not is_call(users[0], *CARRIERS):
            raise UnsupportedError(
                f"attention weights go through {users[0].target} before they meet the values",
                where=source_line(users[0]),
            )
        node = users[0]


def attend(graph: fx.Graph, product: fx.Node, output: fx.Node, rule: ScoreRule, done: Captured) -> Captured:
    """Put the attention op in the place of `output`."""
    wanted = dtype(output)
    q, keys, v = (strip_casts(item) for item in (product.args[0], product.args[1], output.args[1]))
    q = token_major(output, q, rows=-2)
    k = token_major(output, keys, rows=-1)
    v = token_major(output, v, rows=-2)
    # A model that multiplies in float32 widens q and k for it; the op does so by itself, and the cache has one dtype.
    q, k = (x if dtype(x) == dtype(v) else call(output, aten.to.dtype, x, dtype(v)) for x in (q, k))
    heads = int(size(q)[1])
    notices = list(done.notices)
    k, v = one_of_each(output, k), one_of_each(output, v)
    if size(k)[1] != size(v)[1]:  # one of them could not be proven to repeat: use both as they are
        raise UnsupportedError(f"{size(k)[1]} key heads, but {size(v)[1]} value heads", where=source_line(output))
    if heads % int(size(k)[1]):
        raise UnsupportedError(f"{heads} query heads over {size(k)[1]} key heads", where=source_line(output))
    slopes, extra = slopes_node(graph, rule, heads, done.slopes)
    if rule.rounding and not notices:
        notices.append(
            f"the model's code rounds ALiBi to bfloat16 (up to {rule.rounding:.1e} of the largest bias); "
            "the engine uses the unrounded line"
        )
    attention = call(
        output,
        torch.ops.llmbuild.paged_attention.default,
        *(q, k, v),
        done.count,
        rule.scale,
        rule.window,
        None,
        None,
        slopes,
    )
    result = call(output, aten.transpose.int, attention, 0, 1)
    if rank(output) == 4:
        result = call(output, aten.unsqueeze.default, result, 0)
    if dtype(result) != wanted:
        result = call(output, aten.to.dtype, result, wanted)
    replace(output, result)
    return Captured(done.count + 1, {**done.slopes, **extra}, notices)


def token_major(before: fx.Node, x: fx.Node, *, rows: int) -> fx.Node:
    """[1, H, T, D] or [H, T, D] => [T, H, D], inserted before `before`; with rows=-1, [.., D, T] is meant."""
    if rank(x) == 4:
        if size(x)[0] != 1:
            raise UnsupportedError(f"attention over a batch of {size(x)[0]}", where=source_line(x))
        x = call(before, aten.select.int, x, 0, 0)
    if rank(x) != 3:
        raise UnsupportedError(f"attention operands with {rank(x)} axes", where=source_line(x))
    return call(before, aten.permute.default, x, [2, 0, 1] if rows == -1 else [1, 0, 2])


def slopes_node(
    graph: fx.Graph, rule: ScoreRule, heads: int, known: dict[str, Tensor]
) -> tuple[fx.Node | None, dict[str, Tensor]]:
    if rule.slopes is None:
        return None, {}
    slopes = rule.slopes.expand(heads).contiguous()
    for name, other in known.items():
        if torch.equal(slopes, other):
            return next(node for node in graph.nodes if node.name == name), {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    mode = fake_mode_of(graph)
    with graph.inserting_after(last):
        node = graph.placeholder(f"alibi_slopes_{len(known)}")
    with mode:
        node.meta["val"] = torch.empty(heads)
    return node, {node.name: slopes}


def drop_unused_placeholders(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if (
            node.op == "placeholder"
            and not node.users
            and node.name not in ("input_ids", "position_ids", "logits_indices")
        ):
            graph.erase_node(node)


def configured_windows(config: Any) -> tuple[int, ...]:
    """Every window size that a config mentions, by whatever key."""
    given = config.to_dict()
    return tuple(value for key, value in given.items() if "window" in key and type(value) is int and value > 1)
