"""Store weights as the recipe says: first choose, then, after linears are merged, use block-quantized ops.

`choose_formats` wraps weight expressions (`Quantized`, `Compensated`, `Dequantized`) or leaves stored blocks as they
are, has the model calibrated where the recipe asks for it, and rounds what linears of integers read. It runs before
`merge_linears`, which then merges only what is stored alike. `use_blocks` turns every linear and embedding whose weight
is in blocks into `linear_blockwise` and `embedding_blockwise`. A tied embedding and lm_head read one weight
placeholder, hence the same blocks: one tensor in the engine.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import fx

from llmbuild.builder.ir import BlockPart, Cast, Program, Rewrite, Stack, WeightExpr
from llmbuild.builder.passes.edit import arg, arguments, call, describe, dtype, is_call, replace
from llmbuild.builder.passes.float8_products import float8_weight
from llmbuild.builder.passes.fold_weights import new_weight
from llmbuild.builder.passes.int8_products import round_inputs, use_int8
from llmbuild.builder.passes.keep_stored import check_stored
from llmbuild.builder.passes.linear_inputs import Calibrate, Known, known_inputs, linear_inputs
from llmbuild.builder.passes.quantize_cache import cache_inputs, calibrate_cache
from llmbuild.builder.passes.scale_inputs import scale_inputs
from llmbuild.builder.passes.stack_experts import DOWN, UP
from llmbuild.errors import ConfigError
from llmbuild.quantization.compensated import Compensated
from llmbuild.quantization.expressions import Dequantized, Quantized
from llmbuild.quantization.float8 import Float8Weight
from llmbuild.quantization.recipes import (
    Awq,
    Calibrated,
    Fp8,
    Gptq,
    Int8Products,
    KeepStored,
    Plain,
    Recipe,
    Scheme,
    WeightOnly,
    observes,
)

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild
LINEARS = (aten.linear.default, llmbuild.linear_blockwise.default)


def choose_formats(program: Program, recipe: Recipe, calibrate: Calibrate | None = None) -> Rewrite:
    """Choose how each weight is stored. The count is that of weights in blocks; `declined` says why others are not.

    Args:
        calibrate: Gives statistics of what linears read; called once, and only if the recipe makes use of them.

    Raises:
        UnsupportedError: the recipe keeps what is stored, and no blocks hold it.
        ConfigError: the recipe keeps what is stored, and that is not quantized; or a pattern matches no matrix; or
            statistics are needed and there are none.
    """
    log = Rewrite("choose_formats", 0)
    keeps = [(recipe.name, recipe.linear, "--quant")]
    keeps += [(rule.recipe, rule.scheme, "--quant-layer") for rule in recipe.layers]
    for name, scheme, option in keeps:
        if isinstance(scheme, KeepStored):
            check_stored(program.info, name, scheme, option)
    check_patterns(program, recipe)
    head, routers = lm_head(program), router_weights(program)
    weights = [node for node in program.graph.nodes if program.weight_of(node) is not None]
    choices = {node: choose(program, node, recipe, head, routers) for node in weights}
    calibrated = {node: choice.scheme for node, choice in choices.items() if observes(choice.scheme)}
    inputs = linear_inputs(program)
    observed = [*inputs, *cache_inputs(program)]
    known = known_inputs(program, observed, recipe, calibrated, calibrate)
    calibrate_cache(program, recipe, observed, calibrate)
    schemes = {node: choice.scheme for node, choice in choices.items()}
    scaled = scale_inputs(program, inputs, schemes, known)
    log.declined += scaled.declined
    rounded = round_inputs(program, inputs, schemes, known, scaled.searches)
    reasons: dict[str, list[str]] = {}  # reason -> weights it holds for
    for node, choice in choices.items():
        reason = store(program, node, choice, known.get(node))
        if isinstance(choice.scheme, Int8Products) and node not in rounded:
            reason = "weights alone are in 8 bits: it is not the weight of one linear alone, whose inputs are rounded"
        if reason is not None:
            reasons.setdefault(reason, []).append(node.name)
        expr = program.weights[node.name]
        log.count += expr.block_format is not None or isinstance(expr, Float8Weight)
    for reason, names in reasons.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.declined.append(f"{names[0]}{others}: {reason}")
    return log


def check_patterns(program: Program, recipe: Recipe) -> None:
    """Refuse a pattern that no matrix's name matches: it is most likely misspelt, and would do nothing."""
    names = sorted({name for expr in program.weights.values() if len(expr.shape) > 1 for name in expr.sources()})
    given = [(pattern, "--exclude") for pattern in recipe.exclude]
    given += [(rule.pattern, "--quant-layer") for rule in recipe.layers]
    for pattern, option in given:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"no weight of the checkpoint matches {pattern!r}",
                where=option,
                hint=f"matrices are called {', '.join(names[:3])}, ...; * stands for anything",
            )


class Choice(NamedTuple):
    """scheme: how a weight is stored. reason: why it is left as it is although it is a matrix, or None."""

    scheme: Scheme
    reason: str | None = None


def choose(program: Program, node: fx.Node, recipe: Recipe, head: fx.Node | None, routers: set[fx.Node]) -> Choice:
    """Return what the recipe says of one weight."""
    expr = program.weights[node.name]
    role, reason = role_of(program, node, head)
    if node in routers:
        role, reason = None, "chooses experts, which rounding would change"
    scheme: Scheme = Plain() if role is None else getattr(recipe, role)
    tensors = sorted(together(program, node))
    rule = next((rule for tensor in tensors if (rule := recipe.rule_of(tensor)) is not None), None)
    if rule is not None and role is not None:
        scheme = rule.scheme
        if isinstance(scheme, Plain):
            reason = f"recipe {rule.recipe!r} of {rule.pattern!r} keeps it plain"
    for tensor in tensors:
        pattern = recipe.excludes(tensor)
        if pattern is not None:
            scheme, reason = Plain(), f"{tensor} is excluded by {pattern!r}"
    stored = expr.block_format
    if isinstance(scheme, WeightOnly | Calibrated | Int8Products) and stored is not None:
        bits = (scheme if isinstance(scheme, WeightOnly) else scheme.rounding).bits
        if stored.bits <= bits:
            kept = f"kept in {stored.bits} bits as stored ({stored.source}); rounding again to {bits} gains nothing"
            return Choice(KeepStored(), kept)
    if isinstance(scheme, Fp8) and stored is not None:
        return Choice(KeepStored(), f"kept in {stored.bits} bits as stored ({stored.source})")
    if isinstance(scheme, Plain) and stored is not None:
        return Choice(scheme, reason or f"dequantized from {stored.source}: recipe {recipe.name!r} keeps {role} plain")
    quantizes = not all(isinstance(s, Plain) for s in (recipe.linear, *(rule.scheme for rule in recipe.layers)))
    if isinstance(scheme, Plain) and len(expr.shape) > 1 and quantizes:
        return Choice(scheme, reason or f"recipe {recipe.name!r} keeps {role} plain")
    return Choice(scheme)


def store(program: Program, node: fx.Node, choice: Choice, known: Known | None) -> str | None:
    """Give one weight the expression that was chosen; return what is to be said about it, or None."""
    expr, scheme = program.weights[node.name], choice.scheme
    if isinstance(scheme, WeightOnly):
        program.weights[node.name] = quantized(expr, scheme)
    elif isinstance(scheme, Gptq | Awq) and known is None:
        program.weights[node.name] = quantized(expr, scheme.rounding)
        return "rounded to nearest: it is not the weight of one linear alone, whose inputs were observed"
    elif isinstance(scheme, Awq | Int8Products):  # scaled before, where that could be done
        blocks = quantized(expr, scheme.rounding)
        program.weights[node.name] = blocks if expr.dtype == dtype(node) else Cast(blocks, dtype(node))
    elif isinstance(scheme, Gptq) and known is not None:
        program.weights[node.name] = Compensated(expr, scheme, *known)
    elif isinstance(scheme, Plain) and expr.block_format is not None:
        program.weights[node.name] = Dequantized(expr)
    elif isinstance(scheme, Fp8 | KeepStored):
        held, said = float8_weight(program, node, scheme, known)
        program.weights[node.name] = expr if held is None else held
        return choice.reason or said
    return choice.reason


def quantized(expr: WeightExpr, scheme: WeightOnly) -> WeightExpr:
    """Return `expr` in blocks; a stack of experts expert by expert, so that only one is ever held unrounded."""
    if isinstance(expr, Stack):
        return Stack(tuple(Quantized(part, scheme) for part in expr.parts))
    return Quantized(expr, scheme)


def expert_stacks(program: Program, node: fx.Node) -> list[Stack]:
    """Return both weights of a mixture's node as stacks of experts; none if they were not stacked."""
    found = [program.weight_of(arg(node, place)) for place in (UP, DOWN)]
    stacks = [expr for expr in found if isinstance(expr, Stack)]
    return stacks if len(stacks) == len(found) else []


def together(program: Program, node: fx.Node) -> frozenset[str]:
    """Return the checkpoint tensors that share this weight's fate: both weights of experts are in blocks, or none."""
    found = program.weights[node.name].sources()
    for user in node.users:
        if is_call(user, llmbuild.moe_experts.default):
            found = found.union(*(stack.sources() for stack in expert_stacks(program, user)))
    return found


def router_weights(program: Program) -> set[fx.Node]:
    """Return the weights of the linears nearest above the ids and scores of experts."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [
        routed
        for node in program.graph.nodes
        if is_call(node, llmbuild.moe_experts.default)
        for routed in (arg(node, 1), arg(node, 2))
    ]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_call(node, *LINEARS):
            found.add(arg(node, 1))
        else:
            pending.extend(node.all_input_nodes)
    return found


def role_of(program: Program, node: fx.Node, head: fx.Node | None) -> tuple[str | None, str | None]:
    """Return the recipe's field for a weight ("linear", "lm_head", "embedding"), or None and why it has none."""
    embedded = False
    for user in node.users:
        if is_call(user, aten.linear.default) and arg(user, 1) is node and arg(user, 0) is not node:
            continue
        matrix = is_call(user, llmbuild.moe_experts.default) and node in (arg(user, UP), arg(user, DOWN))
        if matrix and expert_stacks(program, user):
            continue
        if is_call(user, aten.embedding.default) and arg(user, 0) is node:
            embedded = True
            continue
        return None, f"is used by {describe(user)}, not by a linear or an embedding"
    if head is not None and head in node.users:
        return "lm_head", None
    return ("embedding" if embedded else "linear"), None


def lm_head(program: Program) -> fx.Node | None:
    """Return the linear that makes the logits: the last one, when its width is the vocabulary's."""
    linears = [node for node in program.graph.nodes if is_call(node, aten.linear.default)]
    if linears and linears[-1].meta["val"].shape[-1] == program.info.vocab_size:
        return linears[-1]
    return None


def use_blocks(program: Program) -> Rewrite:
    """`linear(x, W, b) => linear_blockwise(x, q, scale, offset, b)`, and the same for embeddings and experts.

    Linears whose inputs are rounded become products of integers.
    """
    log = Rewrite("use_blocks", use_int8(program) + use_expert_blocks(program))
    for node in [node for node in program.graph.nodes if program.weight_of(node) is not None]:
        form = program.weights[node.name].block_format
        if form is None or not node.users:
            continue
        parts = block_operands(program, node)
        for user in list(node.users):
            if is_call(user, aten.linear.default):
                rest: tuple[Any, ...] = (arguments(user)[2], form.bits, form.block_size, form.zero)
                new = call(user, llmbuild.linear_blockwise.default, arg(user, 0), *parts, *rest)
            elif is_call(user, aten.embedding.default):
                rest = (form.bits, form.block_size, form.zero, dtype(user))
                new = call(user, llmbuild.embedding_blockwise.default, arg(user, 1), *parts, *rest)
            else:
                raise AssertionError(f"{node.name} is in blocks, but {describe(user)} reads it")
            replace(user, new)
            log.count += 1
    program.drop_unused_weights()
    return log


def use_expert_blocks(program: Program) -> int:
    """`moe_experts(x, ids, scores, U, D, ..) => moe_experts_blockwise(x, ids, scores, u, d, ..)`, u and d in blocks."""
    count = 0
    for node in [node for node in program.graph.nodes if is_call(node, llmbuild.moe_experts.default)]:
        weights = [arg(node, place) for place in (UP, DOWN)]
        forms = [program.weights[weight.name].block_format for weight in weights]
        if None in forms:
            continue
        operands: list[Any] = []
        for weight, form in zip(weights, forms, strict=True):
            assert form is not None
            experts = program.weights[weight.name].shape[0]
            operands += block_operands(program, weight)
            operands.append([experts, form.bits, form.block_size, form.zero])
        rest = arguments(node)[DOWN + 1 :]
        replace(node, call(node, llmbuild.moe_experts_blockwise.default, *node.args[:UP], *operands, *rest))
        count += 1
    return count


def block_operands(program: Program, node: fx.Node) -> list[fx.Node | None]:
    """Add q, scale and offset as weights of their own; offset is None in formats without one."""
    expr = program.weights[node.name]
    assert expr.block_format is not None
    names = ["q", "scale", "offset"] if expr.block_format.has_offset else ["q", "scale"]
    parts: list[fx.Node | None] = [new_weight(program, f"{node.name}_{name}", BlockPart(expr, name)) for name in names]
    return parts if len(parts) == 3 else [*parts, None]
