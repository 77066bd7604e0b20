"""Fake model → plain FX graph over ATen and llmbuild ops, without weights: a 70B config traces in seconds.

Tokens of all sequences of a step lie in one packed row; what separates them is known only to
`llmbuild::paged_attention`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from llmbuild.builder.frontend.buffers import recompute_buffer
from llmbuild.builder.frontend.contract import check_attention, check_tokens_stay_apart, is_attention
from llmbuild.builder.frontend.counted_positions import use_position_ids
from llmbuild.builder.frontend.fake_model import FakeModel, foreign_code
from llmbuild.builder.frontend.hf_model import longest_sequence
from llmbuild.builder.frontend.in_place import is_composite_view, make_functional
from llmbuild.builder.frontend.own_attention import capture, configured_windows
from llmbuild.builder.frontend.plain_graph import plain_graph
from llmbuild.builder.frontend.rope_policy import pinned
from llmbuild.builder.passes.cleanup import SPELLED
from llmbuild.errors import UnsupportedError

_EXAMPLE_TOKENS, _EXAMPLE_LOGITS = 11, 3  # any sizes that differ; both become symbols


@dataclass(frozen=True)
class Trace:
    """A traced model whose weights are still names.

    Attributes:
        graph: Placeholders are INPUT_NAMES, then one per parameter or buffer that the graph reads.
        names: Placeholder name -> name in the model ("model.layers.0.mlp.up_proj.weight").
        literals: Placeholder name -> real tensor, for literals inside the model's code.
        notices: Facts for the report.
    """

    graph: fx.Graph
    names: dict[str, str]
    literals: dict[str, Tensor]
    notices: tuple[str, ...] = ()


class _Packed(nn.Module):
    """The model seen as input_ids [T], position_ids [T], logits_indices [L] -> float32 logits [L, V]."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.arguments = inspect.signature(model.forward).parameters

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_indices: Tensor) -> Tensor:
        keywords: dict[str, Any] = {"use_cache": False}
        if self._takes("position_ids"):
            keywords["position_ids"] = position_ids[None]
        if "logits_to_keep" in self.arguments:
            keywords["logits_to_keep"] = logits_indices
            return self.model(input_ids=input_ids[None], **keywords).logits[0].float()
        # The head is the last thing that runs on tokens: pick its rows right before it.
        head = self.model.get_output_embeddings()
        if head is None:
            raise UnsupportedError("the model has no output embeddings", where=type(self.model).__name__)
        hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, logits_indices], *inputs[1:]))
        try:
            return self.model(input_ids=input_ids[None], **keywords).logits[0].float()
        finally:
            hook.remove()

    def _takes(self, name: str) -> bool:
        return name in self.arguments or any(p.kind is p.VAR_KEYWORD for p in self.arguments.values())


def trace(fake: FakeModel) -> Trace:
    """Trace the model and check that the graph is one that packed tokens and paged attention represent exactly.

    Raises:
        UnsupportedError: naming the module, op or source line that stands in the way.
    """
    if fake.own_experts is None:
        return _trace(fake)
    try:
        traced = _trace(fake)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{fake.own_experts}: its experts are not behind transformers' experts interface, and their own code "
            "cannot be traced",
            where=type(fake.model).__name__,
            hint=error.what.splitlines()[0],
        ) from error
    notice = f"{fake.own_experts}: not behind transformers' interface: traced as the model's code computes them"
    return replace(traced, notices=(*traced.notices, notice))


def _trace(fake: FakeModel) -> Trace:
    sizes = (_EXAMPLE_TOKENS, _EXAMPLE_TOKENS, _EXAMPLE_LOGITS)
    config = fake.model.config
    with foreign_code(config), pinned(fake.model), torch.no_grad():
        with fake.mode:
            example = tuple(torch.zeros(size, dtype=torch.int32) for size in sizes)
        dynamic = ({0: torch.export.Dim.AUTO},) * len(example)
        exported = torch.export.export(_Packed(fake.model), example, dynamic_shapes=dynamic, strict=False)
        unknown = any(is_composite_view(node) and node.target not in SPELLED for node in exported.graph.nodes)
        if unknown or not make_functional(exported.graph):
            # Functional form, views in basic ops; keeps composite ops such as linear. Costs another trace.
            exported = exported.run_decompositions({})
    graph, names, literals = plain_graph(exported)
    notices: list[str] = []
    if not any(is_attention(node) for node in graph.nodes):
        captured = capture(
            graph,
            lambda name: literals[name] if name in literals else recompute_buffer(fake.model, names[name]),
            windows=configured_windows(config),
            longest=longest_sequence(config) or 1 << 20,
        )
        left = {node.name for node in graph.nodes if node.op == "placeholder"}
        names = {placeholder: name for placeholder, name in names.items() if placeholder in left}
        literals = {name: value for name, value in literals.items() if name in left} | captured.slopes
        notices = captured.notices
    use_position_ids(graph)
    check_attention(graph, config)
    check_tokens_stay_apart(graph)
    return Trace(graph, names, literals, tuple(notices))
