"""Names in the model ↔ tensors in the checkpoint: every name bound once, every tensor used or accounted for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from llmbuild.builder.frontend.checkpoint import Checkpoint
from llmbuild.builder.frontend.stacked_experts import stacked_experts
from llmbuild.builder.ir import Cast, Stack, WeightExpr
from llmbuild.builder.weights import PIECE, row_pieces
from llmbuild.errors import ModelError
from llmbuild.quantization.blocks import BlockTensor

_LISTED = 8  # names shown in an error before "and N more"


@dataclass(frozen=True)
class Converted:
    """A weight that transformers assembles from differently shaped checkpoint tensors (fused experts, split qkv).

    Attributes:
        converter: A private copy of the transformers conversion.
        parts: (source pattern, checkpoint tensor) in the order transformers collects them.
        first: Name of the first model weight the conversion yields.
        name: Name of the one wanted here.
    """

    converter: WeightConverter
    parts: tuple[tuple[str, str, WeightExpr], ...]
    first: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    model: PreTrainedModel

    @property
    def block_format(self) -> None:
        return None

    @property
    def from_blocks(self) -> bool:
        """Whether the checkpoint stores blocks, which the conversion does not keep."""
        return any(expr.block_format is not None for _, _, expr in self.parts)

    def load(self) -> Tensor:
        converter = deepcopy(self.converter)
        for pattern, key, expr in self.parts:
            loaded: Any = expr.load()  # it is annotated as a future of a tensor, and takes either
            converter.add_tensor(self.first, key, pattern, loaded)
        results = converter.convert(self.first, model=self.model, config=self.model.config)
        value: Any = results[self.name]
        value = (value[0] if isinstance(value, list) else value).contiguous()
        if tuple(value.shape) != self.shape:
            raise ModelError(f"{self.name} converts to shape {list(value.shape)}, the model has {list(self.shape)}")
        return value

    def load_blocks(self) -> BlockTensor:
        raise TypeError(f"{self.name} is not stored in blocks")

    def sources(self) -> frozenset[str]:
        return frozenset().union(*(expr.sources() for _, _, expr in self.parts))

    def pieces(self, elements: int) -> Iterator[Tensor]:
        return row_pieces(self.load(), elements)

    def block_pieces(self, elements: int) -> Iterator[BlockTensor]:
        yield self.load_blocks()

    def held(self, elements: int) -> int:
        # transformers holds all parts, the result, and one step in between.
        parts = sum(expr.held(math.prod(expr.shape)) for _, _, expr in self.parts)
        return parts + 2 * math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Binding:
    """Model name -> weight in the model's dtype, the names that share one weight, and facts for the report."""

    weights: dict[str, WeightExpr]
    aliases: dict[str, str]
    notices: tuple[str, ...]


def bind(model: PreTrainedModel, checkpoint: Checkpoint, ties: dict[str, str]) -> Binding:
    """Bind all of the checkpoint to the model's names.

    Args:
        model: The model on fake tensors, for names, shapes, dtypes and its conversion rules.
        checkpoint: Where the tensors are.
        ties: Name -> name whose value it shares, when the checkpoint does not hold it.

    Raises:
        ModelError: listing every tensor that is missing, unused or of the wrong shape.
    """
    state = model.state_dict()
    weights, leftover = _match(model, checkpoint, state)
    notices = list(checkpoint.notices)
    ignored = [name for name in leftover if _ignorable(model, name)]
    if ignored:
        notices.append(f"ignored, as transformers does: {_listed(ignored)}")
    split = [expr for expr in weights.values() if isinstance(expr, Converted) and expr.from_blocks]
    if split:
        names = sorted(expr.name for expr in split)
        notices.append(f"dequantized, as the model holds these weights in other matrices: {_listed(names)}")
    aliases = _tie(weights, ties, notices)
    # Persistent buffers may be absent: the graph rarely reads them, and those it reads are recomputed or refused then.
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(parameters - set(weights) - set(aliases))
    unused = sorted(set(leftover) - set(ignored))
    wrong = [
        f"{name}: checkpoint {list(expr.shape)}, model {list(state[name].shape)}"
        for name, expr in sorted(weights.items())
        if tuple(expr.shape) != tuple(state[name].shape)
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensor(s) missing from the checkpoint: {_listed(missing)}")
    if unused:
        problems.append(f"{len(unused)} tensor(s) of the checkpoint are unused by the model: {_listed(unused)}")
    if wrong:
        problems.append(f"{len(wrong)} tensor(s) of the wrong shape: {_listed(wrong)}")
    if problems:
        raise ModelError("; ".join(problems), where=str(checkpoint.files[0].parent), hint=_hint(missing, ties))
    typed = {name: cast(expr, state[name].dtype) for name, expr in weights.items()}
    return Binding(typed, aliases, tuple(notices))


def cast(expr: WeightExpr, dtype: torch.dtype) -> WeightExpr:
    """Return `expr` in `dtype`; the parts of a stack one by one, so that the stack is never held in both."""
    if expr.dtype == dtype:
        return expr
    if isinstance(expr, Stack):
        return Stack(tuple(cast(part, dtype) for part in expr.parts))
    return Cast(expr, dtype)


def _match(
    model: PreTrainedModel, checkpoint: Checkpoint, state: dict[str, Tensor]
) -> tuple[dict[str, WeightExpr], list[str]]:
    """Rename by transformers' own rules. Returns the bound weights and the checkpoint names that fit nowhere."""
    rules = get_model_conversion_mapping(model) if checkpoint.kind == "huggingface" else []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    weights: dict[str, WeightExpr] = {}
    collected: dict[str, list[tuple[str, str, WeightExpr]]] = {}
    leftover: list[str] = []
    for name in sorted(checkpoint.names(), key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        if renamed not in state:
            leftover.append(name)
        elif pattern is not None:
            collected.setdefault(renamed, []).append((pattern, name, checkpoint.weight(name)))
        elif renamed in weights:
            other = ", ".join(sorted(weights[renamed].sources()))
            raise ModelError(f"two tensors of the checkpoint are the model's {renamed!r}: {other} and {name}")
        else:
            weights[renamed] = checkpoint.weight(name)
    for first, parts in collected.items():
        converter = by_pattern[parts[0][0]]
        stack = stacked_experts(converter, parts, first)
        if stack is not None:
            weights[first] = stack
            continue
        for target in _targets(converter, first, state):
            fake = state[target]
            weights[target] = Converted(
                converter, tuple(parts), first, target, tuple(fake.shape), parts[0][2].dtype, model
            )
    return weights, leftover


def _targets(converter: WeightConverter, first: str, state: dict[str, Tensor]) -> list[str]:
    """All model names that a conversion yields; `first` is the one its first target pattern gives."""
    pattern = converter.target_patterns[0]
    names = [first.replace(pattern, other, 1) for other in converter.target_patterns]
    return [name for name in names if name in state]


def _ignorable(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers skips the tensor `name` silently: recomputed buffers of old checkpoints, extra layers."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [buffer for buffer, _ in model.named_buffers()]
    if any(buffer.endswith("rotary_emb.inv_freq") for buffer in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(buffer.endswith("position_ids") for buffer in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return any(re.search(pattern, name) for pattern in patterns)


def _tie(weights: dict[str, WeightExpr], ties: dict[str, str], notices: list[str]) -> dict[str, str]:
    """Share values between tied names. A tie whose two tensors are both stored and differ is not a tie."""
    aliases: dict[str, str] = {}
    for name, source in ties.items():
        if name in weights and source in weights:
            if same_values(weights[name], weights[source]):
                del weights[name]
                aliases[name] = source
            else:
                notices.append(f"{name} and {source} are stored with different values: not tied, whatever the config")
        elif source in weights:
            aliases[name] = source
        elif name in weights:
            weights[source] = weights.pop(name)
            aliases[name] = source
    return aliases


def same_values(first: WeightExpr, second: WeightExpr) -> bool:
    """Whether two weights of one shape are equal everywhere; read piece by piece, up to the first difference."""
    if first.shape != second.shape:
        return False
    pairs = zip(first.pieces(PIECE), second.pieces(PIECE), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _hint(missing: list[str], ties: dict[str, str]) -> str:
    if any("lm_head" in name or "embed_out" in name for name in missing) and not ties:
        return "config.json says tie_word_embeddings = false, so the output head must be stored"
    return "the checkpoint and config.json do not belong to the same model, or files are incomplete"
