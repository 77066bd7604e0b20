"""`f(w) => w'` for elementwise and layout ops on one weight: `1 + w`, `w.float()`, `exp(A_log)`, `inv_freq[None]`.

Tensors that the model's code makes from numbers alone (`ones`, `arange`) become constants first.

Done when weights are written instead of at every step. The stored blocks of a weight and the only copy of a large one
stay as they are: folding would lose the blocks, or store the data twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmbuild.builder.ir import Constant, Map, Program, Rewrite, source_line
from llmbuild.builder.passes.edit import fake_mode_of, is_tensor, replace, size

aten = torch.ops.aten

LAYOUT = (
    aten.to.dtype,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
)
LARGE = 1 << 20  # elements


@dataclass(frozen=True)
class Apply:
    """The function of a folded weight: one op with all its other arguments. Equal calls compare equal."""

    target: Any
    args: tuple[Any, ...]  # the weight's place holds None
    kwargs: tuple[tuple[str, Any], ...]
    place: int

    def __call__(self, weight: Tensor) -> Tensor:
        args = list(self.args)
        args[self.place] = weight
        result = self.target(*args, **dict(self.kwargs))
        assert isinstance(result, Tensor)
        return result


def fold_weights(program: Program) -> Rewrite:
    log = Rewrite("fold_weights", 0)
    for node in list(program.graph.nodes):
        if is_constant(node):
            target: Any = node.target
            replace(node, new_weight(program, f"constant_{node.name}", Constant(target(*node.args, **node.kwargs))))
            log.count += 1
            continue
        weight = only_weight(program, node)
        if weight is None:
            continue
        reason = why_not(program, weight, node)
        if reason is not None:
            log.declined.append(f"{node.name}: {weight.name} {reason} [{source_line(node)}]")
            continue
        replace(node, fold(program, weight, node))
        log.count += 1
    program.drop_unused_weights()
    return log


def is_constant(node: fx.Node) -> bool:
    """Whether `node` makes a small tensor from numbers alone, always the same one."""
    made = node.op == "call_function" and is_tensor(node) and not node.all_input_nodes
    if not made or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return all(isinstance(dim, int) for dim in size(node)) and node.meta["val"].numel() <= LARGE


def only_weight(program: Program, node: fx.Node) -> fx.Node | None:
    """Return the weight that a foldable call reads, if that is all it reads."""
    if node.op != "call_function" or not is_tensor(node) or len(node.all_input_nodes) != 1:
        return None
    source = node.all_input_nodes[0]
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    once = sum(arg is source for arg in node.args) == 1
    foldable = once and (pointwise or node.target in LAYOUT) and all(isinstance(dim, int) for dim in size(node))
    return source if foldable and program.weight_of(source) is not None else None


def why_not(program: Program, weight: fx.Node, node: fx.Node) -> str | None:
    expr = program.weights[weight.name]
    if expr.block_format is not None:
        return f"is stored in blocks ({expr.block_format.source})"
    elements, result = torch.Size(expr.shape).numel(), node.meta["val"].numel()
    if result > elements:
        return f"would grow from {elements} to {result} elements"
    if elements > LARGE and len(weight.users) > 1:
        return f"is large ({elements} elements) and used elsewhere as it is"
    return None


def fold(program: Program, weight: fx.Node, node: fx.Node) -> fx.Node:
    place = next(i for i, arg in enumerate(node.args) if arg is weight)
    args = tuple(None if arg is weight else freeze_list(arg) for arg in node.args)
    apply = Apply(node.target, args, tuple(sorted(node.kwargs.items())), place)
    label = f"{str(node.target).removeprefix('aten.')}({weight.name})"
    source, shape = program.weights[weight.name], tuple(node.meta["val"].shape)
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten.to.dtype
    expr = Map(source, apply, shape, node.meta["val"].dtype, label, rowwise=pointwise and shape == source.shape)
    return new_weight(program, f"{weight.name}_{str(node.target).split('.')[1]}", expr)


def new_weight(program: Program, stem: str, expr: Any) -> fx.Node:
    """Add a weight named after `stem`, made unique, with its fake value."""
    taken = {node.name for node in program.graph.nodes} | set(program.weights)
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    with fake_mode_of(program.graph):
        fake = torch.empty(expr.shape, dtype=expr.dtype)
    return program.add_weight(name, expr, fake)


def freeze_list(value: Any) -> Any:
    return tuple(freeze_list(item) for item in value) if isinstance(value, (list, tuple)) else value
