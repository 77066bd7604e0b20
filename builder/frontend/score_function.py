"""What a model's own attention does to scores between q·kᵀ and the softmax, found by running that code on numbers.

    softmax input [.., H, T, T] = scale · (q·kᵀ) + slope[h] · (j - i)    where key j is visible to query i
                                  so low that its weight is 0           where it is not

The part of the graph between the product and the softmax is run for one sequence of T tokens, with scores of our own.
What comes out must be of this form, for every position and for more than one T; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmbuild.errors import UnsupportedError

HIDDEN = 1000.0  # a score that far below the largest of its row has no weight in float32
LARGEST = 1 << 27  # elements of a probed score tensor
# Ops that take nothing but shape and dtype from their first argument.
SHAPE_ONLY = ("new_", "zeros_like", "ones_like", "full_like", "empty_like", "sym_size")


@dataclass(frozen=True)
class ScoreRule:
    """scale: factor of q·kᵀ. window: positions a query sees, itself included; None: all before it.

    slopes: float32 [H] of `slope · (key position - query position)`, or None. rounding: largest relative deviation of
    the model's own biases from that line, when its code rounds them; 0 when it does not.
    """

    scale: float
    window: int | None
    slopes: Tensor | None
    rounding: float = 0.0


class ScoreFunction:
    """The graph from `product` (q·kᵀ) to `scores` (the softmax's input), as a function of numbers.

    Args:
        product: The node whose value is replaced.
        scores: The node whose value is wanted.
        tokens: The symbolic size T.
        value: Returns the real value of a placeholder that is a buffer or a literal, by name.
    """

    def __init__(self, product: fx.Node, scores: fx.Node, tokens: torch.SymInt, value: Callable[[str], Tensor]) -> None:
        self.product, self.scores, self.value = product, scores, value
        self.symbol = tokens.node.expr
        dtype = product.meta["val"].dtype
        self.half = dtype if dtype in (torch.bfloat16, torch.float16) else None

    def widened(self, value: Any) -> Any:
        """Return a tensor or dtype of the computation as float32: its rounding would hide what the scores are."""
        if isinstance(value, Tensor) and value.dtype == self.half:
            return value.float()
        return torch.float32 if self.half is not None and value is self.half else value

    def zeros(self, length: int) -> Tensor:
        return self.stand_in(self.product.meta["val"], length)

    def __call__(self, products: Tensor, length: int) -> Tensor:
        """Return what the softmax gets when q·kᵀ is `products` and the sequence has `length` tokens: [1, H, T, T]."""
        known: dict[fx.Node, Any] = {self.product: products}
        for node in self.between():
            known[node] = self.compute(node, known, length)
        found = known[self.scores].float()
        return found[None] if found.ndim == 3 else found

    def between(self) -> list[fx.Node]:
        """All nodes that `scores` is computed from, the product and what is above it left out, in graph order."""
        needed: set[fx.Node] = set()
        pending = [self.scores]
        while pending:
            node = pending.pop()
            if node is self.product or node in needed:
                continue
            needed.add(node)
            if self.is_size(node):
                continue
            inputs = node.all_input_nodes
            pending += [item for item in inputs if not (takes_shape_only(node) and item is node.args[0])]
        return [node for node in self.product.graph.nodes if node in needed]

    @staticmethod
    def is_size(node: fx.Node) -> bool:
        return not isinstance(node.meta.get("val"), Tensor | tuple | list)

    def compute(self, node: fx.Node, known: dict[fx.Node, Any], length: int) -> Any:
        if node.op == "placeholder":
            return self.placeholder(node, length)
        if self.is_size(node):
            return self.number(node.meta["val"], length)
        if takes_shape_only(node):
            first: Any = node.args[0]
            known = {**known, first: self.stand_in(first.meta["val"], length)}
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda item: known[item])
        target: Any = node.target
        args = tuple(self.widened(item) for item in args)
        return target(*args, **{name: self.widened(item) for name, item in kwargs.items()})

    def placeholder(self, node: fx.Node, length: int) -> Tensor:
        if node.name == "position_ids":
            return torch.arange(length, dtype=torch.int32)
        if node.name in ("input_ids", "logits_indices"):
            raise UnsupportedError(f"attention scores depend on the values of {node.name} in a way that is not known")
        return self.widened(self.value(node.name))

    def stand_in(self, fake: Tensor, length: int) -> Tensor:
        return torch.zeros([self.number(size, length) for size in fake.shape], dtype=self.widened(fake.dtype))

    def number(self, size: Any, length: int) -> Any:
        """A size or condition of the trace for `length` tokens."""
        if not isinstance(size, torch.SymInt | torch.SymBool | torch.SymFloat):
            return size
        result = size.node.expr.subs({self.symbol: length})
        return bool(result) if isinstance(size, torch.SymBool) else int(result)


def takes_shape_only(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.name.removeprefix("aten::").startswith(SHAPE_ONLY)


def recognise(function: ScoreFunction, windows: tuple[int, ...], longest: int) -> ScoreRule:
    """Find the rule that `function` follows.

    Args:
        function: See ScoreFunction.
        windows: Window sizes that the config mentions: sequences longer than these are looked at.
        longest: Most tokens that the model can take.

    Raises:
        UnsupportedError: It follows none, with the property that does not hold.
    """
    heads = function.zeros(4).numel() // 16
    long = min(longest, max(int((LARGEST / 8 / heads) ** 0.5), 64, *(window + 5 for window in windows), 0))
    if heads * long * long > LARGEST:
        raise UnsupportedError(f"a window of {max(windows)} is too long to be proven from the model's code")
    found = [rule_for(function, length) for length in (min(41, long), long)]
    short_rule, rule = found
    if rule.window is None and short_rule.window is not None:
        raise UnsupportedError("the attention window of the model's code depends on the length of the sequence")
    differs = abs(short_rule.scale - rule.scale) > 1e-5 * abs(rule.scale)
    if short_rule.window is not None and short_rule.window != rule.window:
        differs = True
    if (rule.slopes is None) != (short_rule.slopes is None):
        differs = True
    elif rule.slopes is not None and short_rule.slopes is not None:
        differs |= not torch.allclose(rule.slopes, short_rule.slopes, rtol=1e-5)
    if differs:
        raise UnsupportedError("the model's attention treats scores differently for longer sequences")
    return rule


def rule_for(function: ScoreFunction, length: int) -> ScoreRule:
    """The rule for sequences of exactly `length` tokens."""
    zeros = function.zeros(length)
    bias = function(zeros, length)
    visible = bias > bias.amax(-1, keepdim=True) - HIDDEN
    window = window_of(visible, length)
    return ScoreRule(scale_of(function, bias, visible, length), window, *slopes_of(bias, visible, length))


def window_of(visible: Tensor, length: int) -> int | None:
    """visible bool [1, H, T, T]. None when a query sees all that came before it."""
    positions = torch.arange(length)
    ahead = positions[None, :] - positions[:, None]  # key - query
    window = int(visible[0, 0, -1].sum())
    expected = (ahead <= 0) & (ahead > -window)
    if not bool((visible == expected).all()):
        causal = not bool((visible & (ahead > 0)).any())
        raise UnsupportedError(
            "the model's own attention mask is neither causal nor a causal window"
            if causal
            else "the model's own attention is not causal",
            hint="only decoder language models convert",
        )
    return window if window < length else None


def scale_of(function: ScoreFunction, bias: Tensor, visible: Tensor, length: int) -> float:
    generator = torch.Generator().manual_seed(length)
    zeros = function.zeros(length)
    products = torch.randn(zeros.shape, generator=generator).to(zeros.dtype)
    moved = function(products, length)
    wanted = products.float().reshape(moved.shape)
    change = (moved - bias)[visible.expand_as(moved)]
    given = wanted[visible.expand_as(moved)]
    scale = float((change * given).sum() / (given * given).sum())
    # The bias is added to a score in float32, so the difference keeps the rounding of their sum.
    tolerance = 1e-5 * (1 + float(bias[visible.expand_as(bias)].abs().max()))
    if float((change - scale * given).abs().max()) > tolerance:
        raise UnsupportedError("attention scores are not a multiple of q·kᵀ plus a bias before the softmax")
    hidden = moved[~visible.expand_as(moved)]
    if hidden.numel() and float(hidden.max()) > float(moved[visible.expand_as(moved)].min()) - HIDDEN / 2:
        raise UnsupportedError("what the mask hides still takes part in attention")
    return scale


def slopes_of(bias: Tensor, visible: Tensor, length: int) -> tuple[Tensor | None, float]:
    """Slopes [H] and how far the biases are from the line, relative to it."""
    positions = torch.arange(length, dtype=torch.float64)
    ahead = positions[None, :] - positions[:, None]
    values = bias[0].double()
    relative = values - values.diagonal(dim1=-2, dim2=-1)[..., None]  # a row's constant does not change its softmax
    relative = torch.where(visible[0], relative, 0.0)
    slopes = relative[:, 1, 0] / -1.0
    line = torch.where(visible[0], slopes[:, None, None] * ahead, 0.0)
    deviation = float((relative - line).abs().max())
    scale = float((slopes.abs() * (length - 1)).max())
    if deviation <= 1e-6 * (1 + scale):
        return (slopes.float(), 0.0) if scale > 0 else (None, 0.0)
    # Code that makes the biases in bfloat16 (8 significant bits) rounds slope, position and product.
    if scale > 0 and deviation <= 2.0**-6 * scale:
        return slopes.float(), deviation / scale
    raise UnsupportedError("the bias on attention scores is not a multiple of the distance between key and query")
