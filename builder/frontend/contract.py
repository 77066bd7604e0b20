"""What a decoder must look like to be represented exactly; everything else is refused by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from transformers import PretrainedConfig

from llmbuild.builder.frontend import token_axis
from llmbuild.builder.frontend.rope_policy import rope_dicts, rope_type
from llmbuild.builder.ir import source_line
from llmbuild.errors import UnsupportedError

_ATTENTION = "llmbuild::paged_attention"
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_FOREIGN_KEYS = ("vision_config", "audio_config", "encoder_config")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_config(config: PretrainedConfig) -> None:
    """Refuse what is known from the config alone. Raises UnsupportedError naming the key."""
    if getattr(config, "quantization_config", None) is not None:
        method = _get(config.quantization_config, "quant_method") or "unknown"
        raise UnsupportedError(
            f"the checkpoint is already quantized (quantization_config, quant_method {method!r})",
            where="config.json",
            hint="convert the unquantized checkpoint, or a GGUF file, whose blocks are kept as they are",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(config, "is_encoder_decoder", "only decoder-only language models convert")
    for key in _FOREIGN_KEYS:
        if getattr(config, key, None) is not None:
            raise _refused(config, key, "only text models convert")
    if getattr(config, "attention_chunk_size", None):
        raise _refused(config, "attention_chunk_size", "chunked attention is not supported")
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)):
        raise UnsupportedError(
            f"layer_types holds {kind!r}", where="config.json", hint=f"supported: {', '.join(_LAYER_TYPES)}"
        )
    for where, rope in rope_dicts(config):
        kind = rope_type(rope)
        if kind not in _ROPE_TYPES:
            raise UnsupportedError(
                f"{where}.rope_type is {kind!r}", where="config.json", hint=f"supported: {', '.join(_ROPE_TYPES)}"
            )


def _refused(config: PretrainedConfig, key: str, reason: str) -> UnsupportedError:
    value = getattr(config, key)
    shown = f" = {value!r}" if isinstance(value, bool | int | float | str) else ""
    return UnsupportedError(f"config key {key}{shown}: {reason}", where="config.json")


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else getattr(value, key, None)


def check_attention(graph: fx.Graph, config: PretrainedConfig) -> None:
    """Require exactly one attention op per layer, with the window that the config gives the layer.

    A model that mixes tokens in another way in some layers (convolution, recurrence) shows here as missing ops.
    """
    nodes = [node for node in graph.nodes if is_attention(node)]
    layers = [node.args[3] for node in nodes]
    expected = config.num_hidden_layers
    if sorted(layers) != list(range(expected)):
        lacking = sorted(set(range(expected)) - set(layers))
        twice = sorted({layer for layer in layers if layers.count(layer) > 1})
        detail = f"layers without: {lacking}" if lacking else f"layers with several: {twice}"
        raise UnsupportedError(
            f"{len(nodes)} attention ops for {expected} layers ({detail})",
            where=f"model type {config.model_type!r}",
            hint="every layer must attend once: softmax(q·kᵀ)·v, through the attention interface or written out",
        )
    kinds = getattr(config, "layer_types", None)
    configured = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        configured = None
    windows = {node.args[3]: window_of(node) for node in nodes}
    for layer, window in sorted(windows.items()):
        wanted = (configured if kinds[layer] == "sliding_attention" else None) if kinds else window
        if window != wanted:
            raise UnsupportedError(
                f"layer {layer} attends over a window of {window}, but the config says {wanted}",
                where=f"config.json: layer_types, sliding_window (model type {config.model_type!r})",
            )
    if configured and not kinds and not any(windows.values()):
        raise UnsupportedError(
            f"config key sliding_window = {configured} does not reach attention",
            where=f"model type {config.model_type!r}",
        )


def is_attention(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == _ATTENTION


def window_of(node: fx.Node) -> int | None:
    """The window of an attention node, or None when it sees the whole sequence."""
    return node.args[5] if len(node.args) > 5 else node.kwargs.get("window")  # type: ignore[return-value]


def check_tokens_stay_apart(graph: fx.Graph) -> None:
    """Require that T is symbolic, that positions come from `position_ids`, and that only attention mixes tokens."""
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    tokens = inputs["input_ids"].meta["val"].shape[0]
    if isinstance(tokens, int) or not tokens.node.expr.free_symbols:
        raise UnsupportedError(f"the number of tokens was fixed to {tokens} while tracing")
    problems = [
        (node, reason)
        for node in graph.nodes
        if node.op == "call_function" and not is_attention(node)
        for reason in [token_axis.mixes(node, tokens, inputs["logits_indices"])]
        if reason is not None
    ]
    if problems:
        lines = [f"  {node.name} ({node.target}): {reason} [{source_line(node)}]" for node, reason in problems[:10]]
        raise UnsupportedError(
            f"{len(problems)} op(s) besides attention mix tokens:\n" + "\n".join(lines),
            hint="recurrent and convolutional layers, and positions counted inside the model, are not supported",
        )
    if not inputs["position_ids"].users and not _has_alibi(graph):
        raise UnsupportedError(
            "the model does not use position_ids", hint="it derives positions itself, which packed tokens do not allow"
        )


def _has_alibi(graph: fx.Graph) -> bool:
    """Whether every attention op knows positions by its ALiBi slopes."""
    slopes = [node.args[8] if len(node.args) > 8 else None for node in graph.nodes if is_attention(node)]
    return bool(slopes) and None not in slopes
