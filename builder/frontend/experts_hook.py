"""The experts function that Hugging Face models call while they are traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import llmbuild.plugins.ops  # noqa: F401  (registers torch.ops.llmbuild)
from llmbuild.builder.frontend.expert_activation import ExpertActivation, identify
from llmbuild.errors import UnsupportedError

NAME = "llmbuild"
_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVATION = "_llmbuild_activation"


def register() -> None:
    """Make `experts_implementation="llmbuild"` known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def prepare(model: PreTrainedModel) -> str | None:
    """Find out what each experts module computes between its linears.

    Call outside of any fake mode: the modules' gates are run on numbers.

    Returns:
        What the config says of experts that no module has behind transformers' interface; None when there are none.

    Raises:
        UnsupportedError: a module does more than its linears and an activation, or an unknown activation.
    """
    found = 0
    for module in model.modules():
        if is_experts(module):
            setattr(module, _ACTIVATION, described(module))
            found += 1
    return None if found else promised(model.config)


def promised(config: Any) -> str | None:
    """The config key that promises experts, in words; keys of configs inside it (`ffn_config`) included."""
    for key in _KEYS:
        count = getattr(config, key, None)
        if isinstance(count, int) and count > 1:
            return f"config key {key} = {count}"
    inner = (value for value in vars(config).values() if isinstance(value, PretrainedConfig))
    return next((found for found in map(promised, inner) if found), None)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' `use_experts_implementation` wraps the module's class."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "is_concatenated")


def described(module: Any) -> ExpertActivation:
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError("its experts end with a norm of their own", where=type(module).__name__)
    if module.has_gate:
        return identify(module._apply_gate, module, gated=True, interleaved=not module.is_concatenated)
    return identify(module.act_fn, module, gated=False, interleaved=False)


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H]."""
    kind: ExpertActivation = getattr(module, _ACTIVATION)
    interleaved = module.has_gate and not module.is_concatenated
    stem = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, stem), module.down_proj
    if module.is_transposed or interleaved:
        up = torch.ops.llmbuild.expert_rows(up, module.is_transposed, interleaved)
    if module.is_transposed:
        down = torch.ops.llmbuild.expert_rows(down, True, False)
    up_bias = getattr(module, f"{stem}_bias") if module.has_bias else None
    if up_bias is not None and interleaved:
        up_bias = up_bias.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    down_bias = module.down_proj_bias if module.has_bias else None
    return torch.ops.llmbuild.moe_experts(
        hidden_states, top_k_index, top_k_weights, up, down, up_bias, down_bias, *kind
    )
