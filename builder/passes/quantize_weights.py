"""Store weights as the recipe says: first choose, then, after linears are merged, use block-quantized ops.

`choose_formats` wraps weight expressions (`Quantized`, `Dequantized`) or leaves stored blocks as they are. It runs
before `merge_linears`, which then merges only what is stored alike. `use_blocks` turns every linear and embedding whose
weight is in blocks into `linear_blockwise` and `embedding_blockwise`. A tied embedding and lm_head read one weight
placeholder, hence the same blocks: one tensor in the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmbuild.builder.ir import BlockPart, Program, Rewrite
from llmbuild.builder.passes.edit import arg, arguments, call, describe, dtype, is_call, replace
from llmbuild.builder.passes.fold_weights import new_weight
from llmbuild.errors import ConfigError
from llmbuild.quantization.expressions import Dequantized, Quantized
from llmbuild.quantization.recipes import KeepStored, Plain, Recipe, Scheme, WeightOnly

aten = torch.ops.aten
llmbuild = torch.ops.llmbuild


def choose_formats(program: Program, recipe: Recipe) -> Rewrite:
    """Choose how each weight is stored. The count is that of weights in blocks; `declined` says why others are not.

    Raises:
        ConfigError: the recipe keeps stored blocks, and the checkpoint has none.
    """
    log = Rewrite("choose_formats", 0)
    if isinstance(recipe.linear, KeepStored) and program.info.source_kind != "gguf":
        raise ConfigError(
            f"recipe {recipe.name!r} keeps the blocks of a GGUF file, but the model is {program.info.source_kind!r}",
            where="--quant",
            hint="use int8-wo or int4-wo to quantize, or none",
        )
    head = lm_head(program)
    reasons: dict[str, list[str]] = {}  # reason -> weights it holds for
    for node in [node for node in program.graph.nodes if program.weight_of(node) is not None]:
        reason = choose(program, node, recipe, head)
        if reason is not None:
            reasons.setdefault(reason, []).append(node.name)
        log.count += program.weights[node.name].block_format is not None
    for reason, names in reasons.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.declined.append(f"{names[0]}{others}: {reason}")
    return log


def choose(program: Program, node: fx.Node, recipe: Recipe, head: fx.Node | None) -> str | None:
    """Apply the recipe to one weight; return why the weight was left plain although it is a matrix, or None."""
    expr = program.weights[node.name]
    role, reason = role_of(node, head)
    scheme: Scheme = Plain() if role is None else getattr(recipe, role)
    for tensor in sorted(expr.sources()):
        pattern = recipe.excludes(tensor)
        if pattern is not None:
            scheme, reason = Plain(), f"{tensor} is excluded by {pattern!r}"
    stored = expr.block_format
    if isinstance(scheme, WeightOnly) and stored is not None and stored.bits <= scheme.bits:
        return f"kept in {stored.bits} bits as stored ({stored.source}); rounding again to {scheme.bits} gains nothing"
    if isinstance(scheme, WeightOnly):
        program.weights[node.name] = Quantized(expr, scheme)
        return None
    if isinstance(scheme, Plain) and stored is not None:
        program.weights[node.name] = Dequantized(expr)
        return reason or f"dequantized from {stored.source}: recipe {recipe.name!r} keeps {role} plain"
    if isinstance(scheme, Plain) and len(expr.shape) > 1 and not isinstance(recipe.linear, Plain):
        return reason or f"recipe {recipe.name!r} keeps {role} plain"
    return None


def role_of(node: fx.Node, head: fx.Node | None) -> tuple[str | None, str | None]:
    """Return the recipe's field for a weight ("linear", "lm_head", "embedding"), or None and why it has none."""
    embedded = False
    for user in node.users:
        if is_call(user, aten.linear.default) and arg(user, 1) is node and arg(user, 0) is not node:
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
    """`linear(x, W, b) => linear_blockwise(x, q, scale, offset, b)`, and the same for embeddings."""
    log = Rewrite("use_blocks", 0)
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


def block_operands(program: Program, node: fx.Node) -> list[fx.Node | None]:
    """Add q, scale and offset as weights of their own; offset is None in formats without one."""
    expr = program.weights[node.name]
    assert expr.block_format is not None
    names = ["q", "scale", "offset"] if expr.block_format.has_offset else ["q", "scale"]
    parts: list[fx.Node | None] = [new_weight(program, f"{node.name}_{name}", BlockPart(expr, name)) for name in names]
    return parts if len(parts) == 3 else [*parts, None]
