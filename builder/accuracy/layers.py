"""Which layers of a quantized program err, and by how much, each compared with the unquantized program's.

Nodes of both programs are matched by what they are, not by where passes put them: a linear by the checkpoint tensor of
its weight (also as one of the parts of a merged linear), attention and blocks by their layer. Two errors of each:

    error  of the output when the whole program is quantized: what came before adds to it
    own    of the output when every layer before had the unquantized output: what this layer alone adds
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from llmbuild.builder.accuracy.walk import Runner, Walk
from llmbuild.builder.accuracy.windows import BLOCK_SIZE, Window, steps
from llmbuild.builder.ir import Concat, Program, WeightExpr
from llmbuild.builder.passes.edit import arg, getitems, is_call, is_tensor, size
from llmbuild.builder.passes.stack_experts import UP

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
WEIGHTED = ("linear", "embedding", "experts")  # kinds of layers with weights


class Layer(NamedTuple):
    """kind: "linear", "embedding", "experts", "attention" or "block". name: checkpoint tensor, or "layer 3"."""

    kind: str
    name: str


class LayerError(NamedTuple):
    """Errors of one layer's output over all tokens that were run.

    error: ‖y' - y‖ / ‖y‖ in the quantized program; 0 where both are 0, inf where only y is.
    own: The same when all layers before had the unquantized output.
    cosine: Of y' and y in the quantized program; 1 where both are 0.
    worst_error, worst_token: Largest error of one token's row, and the token's place.
    """

    layer: Layer
    error: float
    own: float
    cosine: float
    worst_error: float
    worst_token: int


class LayerErrors(NamedTuple):
    """errors: in the order of the graph. unmatched: layers that one of the programs does not have."""

    errors: tuple[LayerError, ...]
    unmatched: tuple[Layer, ...]

    def worst(self, count: int = 3, kinds: Collection[str] = WEIGHTED) -> list[LayerError]:
        """Return the layers that add most themselves: of those with weights, or of other kinds."""
        found = [each for each in self.errors if each.layer.kind in kinds]
        return sorted(found, key=lambda each: (-each.own, each.layer))[:count]


def layer_errors(reference: Runner, candidate: Runner, window: Window) -> LayerErrors:
    """Run both on one window, stopping at every layer; a layer's output is held until it is compared."""
    expected, given = layers_of(reference.program), layers_of(candidate.program)
    shared = expected.keys() & given.keys()
    unmatched = [layer for layer in (*expected, *given) if layer not in shared]
    (step, _) = next(steps(window, chunk=len(window), block_size=BLOCK_SIZE))
    places = [{node: layer for layer, node in each.items() if layer in shared} for each in (expected, given)]
    exact = Walk(reference, step, reference.new_state(), places[0])
    quantized, forced = (Walk(candidate, step, candidate.new_state(), places[1]) for _ in range(2))
    outputs: dict[Layer, Tensor] = {}
    found: dict[Layer, LayerError] = {}
    replacement: Tensor | None = None
    while (stop := quantized.next()) is not None:
        alone = forced.next(replacement)
        layer = stop[0]
        assert alone is not None and alone[0] == layer
        while layer not in outputs:  # merged linears come earlier than they did alone
            ahead = exact.next()
            assert ahead is not None
            outputs[ahead[0]] = residual(ahead[1])
        y = outputs.pop(layer)
        found[layer] = compare_outputs(layer, y, residual(stop[1]), residual(alone[1]))
        # A block's sum follows from the layers inside, which have been replaced.
        replacement = None if layer.kind == "block" else y
    return LayerErrors(tuple(found[layer] for layer in expected if layer in found), tuple(unmatched))


def residual(value: Any) -> Tensor:
    """Return the sum of add_rms_norm's two results, and any other value as it is."""
    tensor = value[1] if isinstance(value, (tuple, list)) else value
    assert isinstance(tensor, Tensor)
    return tensor


def compare_outputs(layer: Layer, y: Tensor, quantized: Tensor, alone: Tensor) -> LayerError:
    """Compare outputs of one layer, [tokens, ...] each, in float64."""
    y, quantized, alone = (value.flatten(1).double() for value in (y, quantized, alone))
    if not y.shape == quantized.shape == alone.shape:
        raise AssertionError(f"{layer}: outputs of {list(y.shape)}, {list(quantized.shape)}, {list(alone.shape)}")
    gaps, norms = (quantized - y).norm(dim=1), y.norm(dim=1)
    rows = [ratio(float(gap), float(norm)) for gap, norm in zip(gaps, norms, strict=True)]
    worst = max(range(len(rows)), key=lambda row: (rows[row], -row))
    length, other = float(y.norm()), float(quantized.norm())
    both_zero = length == other == 0
    cosine = 1.0 if both_zero else float((y * quantized).sum()) / (length * other) if length and other else 0.0
    return LayerError(
        layer,
        error=ratio(float(gaps.norm()), length),
        own=ratio(float((alone - y).norm()), length),
        cosine=cosine,
        worst_error=rows[worst],
        worst_token=worst,
    )


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0 if part == 0 else float("inf")


def layers_of(program: Program) -> dict[Layer, fx.Node]:
    """Return the node that holds each layer's output, in the order of the graph."""
    found: dict[Layer, fx.Node] = {}
    for layer, node in _layers(program):
        count, name = 1, layer.name
        while layer in found:  # one weight, used again
            count += 1
            layer = Layer(layer.kind, f"{name} ({count})")
        found[layer] = node
    return found


def _layers(program: Program) -> Iterator[tuple[Layer, fx.Node]]:
    ends = {node: Layer("block", f"layer {index}") for index, node in enumerate(block_ends(program))}
    for node in program.graph.nodes:
        op = op_name(node)
        if op.startswith(("aten::linear", "llmbuild::linear")):
            yield from linear_outputs(program, node)
        elif op.startswith(("aten::embedding", "llmbuild::embedding")):
            yield Layer("embedding", weight_name(program, first_weight(program, node))), node
        elif op.startswith("llmbuild::moe_experts"):
            yield Layer("experts", weight_name(program, arg(node, UP))), node
        elif op.startswith("llmbuild::paged_attention"):
            yield Layer("attention", f"layer {arg(node, 3)}"), node
        if node in ends:
            yield ends[node], node


def op_name(node: fx.Node) -> str:
    """Return "aten::linear", without its overload; the empty string for what is no op."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if node.op == "call_function" and schema is not None else ""


def first_weight(program: Program, node: fx.Node) -> fx.Node:
    return next(each for each in node.all_input_nodes if program.weight_of(each) is not None)


def linear_outputs(program: Program, node: fx.Node) -> Iterator[tuple[Layer, fx.Node]]:
    """Yield a linear's output; of a merged one the parts of its split, by the weights that were merged."""
    weight = arg(node, 1)
    expr = program.weight_of(weight)
    if expr is None:  # a product of two activations
        return
    parts = merged_parts(expr)
    rows = [part.shape[0] for part in parts]
    for split in node.users:
        if len(parts) > 1 and is_call(split, aten.split_with_sizes.default) and list(arg(split, 1)) == rows:
            for index, piece in sorted(getitems(split).items()):
                yield Layer("linear", tensors_name(parts[index], weight.name)), piece
            return
    yield Layer("linear", weight_name(program, weight)), node


def merged_parts(expr: WeightExpr) -> tuple[WeightExpr, ...]:
    """Return the weights that lie below one another in a merged one."""
    inner: Any = expr
    while inner is not None and not isinstance(inner, Concat):  # below casts, blocks and what rounds them
        inner = getattr(inner, "source", None)
    return () if inner is None else inner.parts


def weight_name(program: Program, node: fx.Node) -> str:
    return tensors_name(program.weights[node.name], node.name)


def tensors_name(expr: WeightExpr, otherwise: str) -> str:
    """Name a weight by its checkpoint tensors: the one, or what is common to all ("model.layers.0.mlp.experts.*")."""
    return common_name(expr.sources()) or otherwise


def common_name(tensors: Collection[str]) -> str:
    """Return one name for several tensors, see `tensors_name`; the empty string for none."""
    names = sorted(name.removesuffix(".weight") for name in tensors)
    if len(names) < 2:
        return names[0] if names else ""
    first, last = names[0], names[-1]
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, names)))
    rests = sorted({name[common:] for name in names})
    listed = "{" + ",".join(rests) + "}" if len(rests) <= 4 else "*"
    return first[:common] + listed


def block_ends(program: Program) -> list[fx.Node]:
    """Return the output of each block: the last sum of two [T, hidden] values before the next attention, or the end.

    None at all where a block has no such sum.
    """
    ends: list[fx.Node] = []
    last: fx.Node | None = None
    attended = 0
    for node in program.graph.nodes:
        if op_name(node).startswith("llmbuild::paged_attention"):
            if attended and last is not None:
                ends.append(last)
            attended += 1
        elif attended and is_residual_sum(program, node):
            last = node
    if attended and last is not None:
        ends.append(last)
    return ends if len(ends) == attended and len(set(ends)) == len(ends) else []


def is_residual_sum(program: Program, node: fx.Node) -> bool:
    if is_call(node, llmbuild.add_rms_norm.default):
        return True
    if not is_call(node, aten.add.Tensor):
        return False
    terms = [each for each in node.args if isinstance(each, fx.Node) and is_tensor(each)]
    wide = len(terms) == 2 and all(
        len(size(each)) == 2 and size(each)[-1] == program.info.hidden_size for each in terms
    )
    return wide and all(program.weight_of(each) is None for each in terms)
