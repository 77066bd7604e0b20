"""The attention function that Hugging Face models call while they are traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

import llmbuild.plugins.ops  # noqa: F401  (registers torch.ops.llmbuild)
from llmbuild.errors import UnsupportedError

NAME = "llmbuild"
# Keyword arguments that carry nothing attention depends on here: positions are already in q and k, the cache is
# implicit, dropout is off. Any other argument that is not None stops the trace.
_IRRELEVANT = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",
        "head_mask",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def register() -> None:
    """Make `attn_implementation="llmbuild"` known to transformers.

    No mask function is registered under that name, so that models build no mask at all: causality, windows and the
    boundaries between sequences belong to the op.
    """
    AttentionInterface.register(NAME, attention)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None).

    Raises:
        UnsupportedError: the model asks for something the paged attention op cannot represent.
    """
    where = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedError("the model builds its own attention mask", where=where)
    if not _causal(module, kwargs):
        raise UnsupportedError("attention is not causal", where=where, hint="only decoder language models convert")
    # An explicit None means the whole sequence; a model that passes nothing leaves the window to the mask, and its
    # module usually knows it. `contract.check_attention` compares the outcome with the config.
    window = kwargs.pop("sliding_window") if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _IRRELEVANT)
    if unknown:
        raise UnsupportedError(f"attention takes arguments that are not supported: {', '.join(unknown)}", where=where)
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError("cross-attention: queries and keys have different lengths", where=where)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = torch.ops.llmbuild.paged_attention(
        q,
        k,
        v,
        _layer_index(module),
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        int(window) if window else None,
        float(softcap) if softcap else None,
        s_aux,
    )
    return out[None], None


def _causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise UnsupportedError("the attention module does not know its layer index", where=type(module).__name__)
    return int(index)
