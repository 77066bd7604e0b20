"""What `autoquant` chooses for: units of weights that get one recipe, and what a unit is under each recipe.

A unit is all linears that read one value (q, k and v; gate and up; ...), or all experts of a mixture. Linears of one
value are one matrix in the engine only if they are stored alike, and 8-bit products round their value once for all.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from llmbuild.builder.accuracy.layers import common_name
from llmbuild.builder.accuracy.walk import copy_program
from llmbuild.builder.ir import Program, WeightExpr
from llmbuild.builder.passes.edit import arg, is_call, size
from llmbuild.builder.passes.linear_inputs import Calibrate, linear_inputs
from llmbuild.builder.passes.quantize_weights import (
    choose_formats,
    expert_stacks,
    lm_head,
    role_of,
    router_weights,
)
from llmbuild.builder.passes.stack_experts import DOWN, UP
from llmbuild.builder.weights import Stack
from llmbuild.quantization.float8 import FLOAT8, Float8Weight
from llmbuild.quantization.recipes import customized, find_recipe, needs_gram

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
SCALE_BYTES = 2  # of a scale or an offset of a block

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Unit:
    """Weights that get one recipe.

    Attributes:
        name: Of its checkpoint tensors: the one, or what is common to all.
        tensors: Their names, sorted.
        weights: Placeholders of them in the graph.
        nodes: Calls that read these.
        role: Field of `Recipe` that says what a recipe makes of them.
        share: Which part of them a decode step of one token reads; below 1 for experts.
    """

    name: str
    tensors: tuple[str, ...]
    weights: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    role: str
    share: float


@dataclass(frozen=True)
class Option:
    """A unit under one recipe.

    Attributes:
        recipe: Its name.
        weights: By placeholder name, how they are stored.
        calls: What a node of the unit does instead, where it rounds what it reads.
        exact: Whether nothing is rounded: the recipe does not change these weights.
        stored: Bytes of the weights in the engine.
        read: Bytes of them that a decode step of one token reads.
    """

    recipe: str
    weights: Mapping[str, WeightExpr]
    calls: Mapping[fx.Node, Call]
    exact: bool
    stored: int
    read: int = field(default=0)


def find_units(program: Program) -> list[Unit]:
    """Return the units of a program whose weights are not quantized yet, in the order of the graph.

    Weights that several values meet, routers and what is no linear belong to none.
    """
    head, routers = lm_head(program), router_weights(program)
    found: dict[fx.Node, Unit] = {}

    def add(weights: Iterable[fx.Node], nodes: Sequence[fx.Node], share: float) -> None:
        roles = {weight: role_of(program, weight, head)[0] for weight in weights if weight not in routers}
        for role in sorted({role for role in roles.values() if role is not None}):
            chosen = tuple(weight for weight, own in roles.items() if own == role)
            tensors = tuple(sorted({name for weight in chosen for name in program.weights[weight.name].sources()}))
            reading = [node for node in nodes if any(weight in node.all_input_nodes for weight in chosen)]
            users = dict.fromkeys(user for weight in chosen for user in weight.users)  # a tied embedding too
            found[reading[0]] = Unit(common_name(tensors), tensors, chosen, tuple(users), role, share)

    for each in linear_inputs(program):
        add([arg(node, 1) for node in each.linears], each.linears, 1.0)
    for node in program.graph.nodes:
        if is_call(node, llmbuild.moe_experts.default) and expert_stacks(program, node):
            up = arg(node, UP)
            experts, used = program.weights[up.name].shape[0], int(size(arg(node, 1))[-1])
            add([up, arg(node, DOWN)], [node], min(1.0, used / experts))
    return [found[node] for node in program.graph.nodes if node in found]


def find_options(
    program: Program, units: Sequence[Unit], recipe: str, itemsize: int, calibrate: Calibrate | None = None
) -> list[Option]:
    """Return what each unit is under a recipe.

    Args:
        program: As `find_units` had it. Not changed.
        itemsize: Bytes of a number in the computation dtype of the target.
        calibrate: Gives the statistics that the recipe asks for. There are no Gram matrices of what the lm_head reads:
            then that stays plain.
    """
    rounded = copy_program(program)
    plain: tuple[str, ...] = ()
    if needs_gram(find_recipe(recipe).linear):
        plain = tuple(glob.escape(name) for unit in units if unit.role == "lm_head" for name in unit.tensors)
    choose_formats(rounded, customized("none", plain, (f"*={recipe}",)), calibrate)
    named = {node.name: node for node in rounded.graph.nodes}
    options = []
    for unit in units:
        weights = {weight.name: rounded.weights[weight.name] for weight in unit.weights}
        calls = {node: call for node in unit.nodes if (call := rounding_call(rounded, named[node.name])) is not None}
        changed = any(is_rounded(weights[weight.name], program.weights[weight.name]) for weight in unit.weights)
        stored = sum(stored_bytes(expr, itemsize) for expr in weights.values())
        read = math.ceil(stored * unit.share)
        options.append(Option(recipe, weights, calls, not changed and not calls, stored, read))
    return options


def is_rounded(expr: WeightExpr, before: WeightExpr) -> bool:
    """Whether a weight is stored in fewer bits than the checkpoint has of it."""
    if isinstance(expr, Float8Weight):
        return True
    return expr.block_format is not None and expr.block_format != before.block_format


def rounding_call(program: Program, node: fx.Node) -> Call | None:
    """Return a linear that rounds what it reads as this one will; None if it reads it as it is."""
    if not is_call(node, aten.linear.default):
        return None
    x, expr = arg(node, 0), program.weight_of(arg(node, 1))
    if is_call(x, llmbuild.round_rows.default):
        return lambda x, *rest: aten.linear.default(llmbuild.round_rows(x, None, torch.int8), *rest)
    if not isinstance(expr, Float8Weight):
        return None
    columns = expr.block[1]

    def linear(x: Tensor, *rest: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, columns))
        return aten.linear.default(llmbuild.round_rows(groups, None, FLOAT8).flatten(-2), *rest)

    return linear


def stored_bytes(expr: WeightExpr, itemsize: int) -> int:
    """Return the bytes of a weight in an engine: its numbers at their width, and its scales; without padding."""
    if isinstance(expr, Stack):
        return sum(stored_bytes(part, itemsize) for part in expr.parts)
    elements = math.prod(expr.shape)
    if isinstance(expr, Float8Weight):
        rows, columns = expr.shape
        return elements + 4 * math.ceil(rows / expr.block[0]) * math.ceil(columns / expr.block[1])
    form = expr.block_format
    if form is None:
        return elements * itemsize
    scales = elements // expr.shape[-1] * math.ceil(expr.shape[-1] / form.block_size)
    return math.ceil(elements * form.bits / 8) + scales * SCALE_BYTES * (2 if form.has_offset else 1)


def other_bytes(program: Program, units: Sequence[Unit], itemsize: int) -> tuple[int, int]:
    """Return the bytes of all weights of no unit, and those that a decode step reads: no table of embeddings.

    No choice rounds them, and what a checkpoint stores of them in blocks is dequantized (`choice.quant_config`).
    """
    chosen = {weight.name for unit in units for weight in unit.weights}
    stored = read = 0
    for node in program.graph.nodes:
        expr = program.weight_of(node)
        if expr is None or node.name in chosen:
            continue
        size_of = math.prod(expr.shape) * itemsize
        stored += size_of
        read += 0 if all(is_call(user, aten.embedding.default) for user in node.users) else size_of
    return stored, read
