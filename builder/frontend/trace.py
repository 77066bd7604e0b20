"""Model config → plain FX graph over ATen and llmbuild ops, without weights.

The model is built and exported on fake tensors, so that a 70B config traces in seconds. Tokens of all sequences of a
step lie in one packed row; what separates them is known only to `llmbuild::paged_attention`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from llmbuild.builder.frontend import attention_hook
from llmbuild.builder.frontend.contract import check_attention, check_config, check_tokens_stay_apart
from llmbuild.builder.ir import INPUT_NAMES
from llmbuild.errors import LLMBuildError, UnsupportedError

_EXAMPLE_TOKENS, _EXAMPLE_LOGITS = 11, 3


@dataclass(frozen=True)
class Trace:
    """A traced model whose weights are still names.

    Attributes:
        graph: Placeholders are INPUT_NAMES, then one per parameter or buffer that the graph reads.
        names: Placeholder name -> name in the model ("model.layers.0.mlp.up_proj.weight").
        literals: Placeholder name -> real tensor, for literals inside the model's code.
        model: The model on fake tensors; tied parameters are separate.
        ties: Name -> name of the parameter it shares its value with, as config and class say.
    """

    graph: fx.Graph
    names: dict[str, str]
    literals: dict[str, Tensor]
    model: PreTrainedModel
    ties: dict[str, str]


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


def trace(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Trace:
    """Trace the decoder that `config` describes, computing in `dtype`.

    Raises:
        UnsupportedError: the model cannot be represented exactly; names the config key, module or op.
    """
    check_config(config)
    attention_hook.register()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    # Models are other people's code: whatever they or the exporter raise means "cannot be traced", and keeps its cause.
    try:
        with mode, torch.no_grad():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention_hook.NAME, trust_remote_code=trust_remote_code
            ).eval()
            ties = _untie(model)
            sizes = (_EXAMPLE_TOKENS, _EXAMPLE_TOKENS, _EXAMPLE_LOGITS)
            example = tuple(torch.zeros(size, dtype=torch.int32) for size in sizes)
        with torch.no_grad():
            dynamic = ({0: torch.export.Dim.AUTO},) * len(example)
            exported = torch.export.export(_Packed(model), example, dynamic_shapes=dynamic, strict=False)
            if any(_mutates(node) for node in exported.graph.nodes):
                exported = exported.run_decompositions({})  # functional form; keeps composite ops such as linear
    except LLMBuildError:
        raise
    except Exception as error:
        raise _untraceable(config, error) from error
    graph, names, literals = _plain_graph(exported)
    check_attention(graph, config)
    check_tokens_stay_apart(graph)
    return Trace(graph, names, literals, model, ties)


def _untie(model: PreTrainedModel) -> dict[str, str]:
    """Give every tied name its own parameter, so that the graph reads each by its name. Returns the ties."""
    ties = dict(model.all_tied_weights_keys or {})
    for name in ties:
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        tied = getattr(module, attribute)
        setattr(module, attribute, nn.Parameter(torch.empty_like(tied), requires_grad=False))
    return ties


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _plain_graph(exported: torch.export.ExportedProgram) -> tuple[fx.Graph, dict[str, str], dict[str, Tensor]]:
    """Copy the exported graph without guards and asserts: inputs first, then the parameters and buffers it uses."""
    source = exported.graph
    _drop_guards(source)
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    placeholders = [node for node in source.nodes if node.op == "placeholder"]
    inputs = [node for node in placeholders if specs[node.name].kind is InputKind.USER_INPUT]
    stored = [node for node in placeholders if node not in inputs and node.users]

    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    names: dict[str, str] = {}
    literals: dict[str, Tensor] = {}
    for node, name in zip(inputs, INPUT_NAMES, strict=True):
        copied[node] = _placeholder(graph, name, node)
    for node in stored:
        target = specs[node.name].target
        assert target is not None
        new = copied[node] = _placeholder(graph, target.removeprefix("model.").replace(".", "_"), node)
        if specs[node.name].kind is InputKind.CONSTANT_TENSOR:
            literals[new.name] = _real_literal(exported.constants[target], target)
        else:
            names[new.name] = target.removeprefix("model.")
    for node in source.nodes:
        if node.op == "call_function":
            copied[node] = graph.node_copy(node, lambda argument: copied[argument])
        elif node.op == "output":
            graph.output(copied[node.args[0][0]])
        elif node.op != "placeholder":
            raise UnsupportedError(f"the exported graph holds a {node.op} node ({node.target})", where=node.name)
    graph.lint()
    return graph, names, literals


def _drop_guards(graph: fx.Graph) -> None:
    """Erase guards and asserts, then everything that only they used."""
    for node in list(graph.nodes):
        if any(word in str(node.target) for word in ("_guards", "_assert", "sym_constrain")) and not node.users:
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _placeholder(graph: fx.Graph, name: str, source: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = source.meta["val"]
    return node


def _real_literal(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor) or isinstance(value, torch._subclasses.FakeTensor):
        raise UnsupportedError(f"the value of the literal {name!r} in the model's code is not known at build time")
    return value.detach().clone()


def _untraceable(config: PretrainedConfig, error: Exception) -> UnsupportedError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UnsupportedError(
        f"model type {config.model_type!r} cannot be traced: {type(error).__name__}: {reason.strip()[:300]}",
        hint="the model's code must run on packed tokens without looking at their values",
    )
